"""Step 4 of the path: hold a key while compiling it, so that one process of a host does and the others wait.

The lock is the kernel's (`flock`, through filelock): it is freed the moment its holder dies, however it dies, and a
lock file left behind delays nobody. The lock file's content is a record of its holder, for people; liveness never
rests on it. It also carries the last failure: who waited for a compile that failed gets its error at once instead of
repeating it. Who asks later compiles again: a failure is an answer to those who waited, not a cached result.

A holder can also stop without dying (SIGSTOP, a hung file system). A waiter gives it `stall_limit` seconds; then one
waiter takes the key's takeover lock and compiles, and the others wait for that one. At most two compiles in all.

filelock is imported here only, and this module only on a miss: importing it takes 44 ms.
"""

import dataclasses
import errno
import json
import os
import socket
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import Any

from filelock import BaseFileLock, FileLock, StrictSoftFileLock, Timeout

from muse_jit.key.encoding import KeyDigest
from muse_jit.store.layout import Layout

POLL_SECONDS = 0.05
"""How often a waiter tries."""

_WITHOUT_FLOCK = (errno.ENOLCK, errno.ENOTSUP, errno.EOPNOTSUPP, errno.ENOSYS)
_RECORD_BYTES = 1 << 16


class LockTimeout(Exception):
    """Neither the lock nor the takeover lock came free within the limit. `holder` is what its record says."""

    def __init__(self, path: str, holder: str) -> None:
        super().__init__(f"{path} is held by {holder}")
        self.path = path
        self.holder = holder


@dataclasses.dataclass(frozen=True)
class Failure:
    """A compile that failed under a lock."""

    message: str
    log_path: str
    clock: float
    """When, by `time.monotonic()` of `host`: all processes of a host share that clock, and it never steps."""
    host: str

    def answers(self, since: float) -> bool:
        """Whether it happened after `since` (by this process's monotonic clock), on this host, since it was started:
        after a reboot the clock begins anew, and an old failure would lie ahead of every request."""
        return self.host == socket.gethostname() and since <= self.clock <= time.monotonic()


@dataclasses.dataclass
class Held:
    """A lock that is held: what its record said before, and where to leave a failure."""

    path: str
    failure: Failure | None

    def fail(self, message: str, log_path: str) -> None:
        """Leave a failure for those who wait now. Not being able to is no error: they then find out themselves."""
        failure = Failure(message, log_path, time.monotonic(), socket.gethostname())
        with suppress(OSError):
            descriptor = os.open(self.path, os.O_WRONLY | os.O_NOFOLLOW | os.O_CLOEXEC)
            try:
                _write(descriptor, {**_record("failed"), "failure": dataclasses.asdict(failure)})
            finally:
                os.close(descriptor)


@contextmanager
def hold(
    layout: Layout,
    digest: KeyDigest,
    what: str,
    stall_limit: float,
    on_wait: Callable[[str], None] | None = None,
    until: Callable[[], bool] | None = None,
    waited: float = 0.0,
) -> Iterator[Held]:
    """Hold the lock of one key. `on_wait` is called once, with a description of the holder, before waiting.

    `waited` are the seconds that the caller has waited for this holder already.

    Waiting ends early when `until` says that there is nothing to wait for (somebody who took over from a stopped
    holder has published); the lock is then not held, and the caller finds the entry.

    Raises:
        OSError: the lock file cannot be made or locked (read-only folder, full disk, no locks on this file system).
        LockTimeout: the holder and the one that took over both stalled.
    """
    path = layout.lock(digest)
    layout.make_parents(path)
    got = _acquire(layout, path, what, 0.0)
    if got is None:
        if on_wait is not None:
            on_wait(describe_holder(path))
        got = _acquire(layout, path, what, max(0.0, stall_limit - waited), until)
        if got is None and not (until is not None and until()):
            path = layout.lock(digest, "takeover.lock")
            got = _acquire(layout, path, what, stall_limit, until)
    if got is None:
        if until is not None and until():
            yield Held(path, None)
            return
        raise LockTimeout(path, describe_holder(path))
    lock, held = got
    try:
        yield held
    finally:
        _release(lock)


@contextmanager
def try_lock(layout: Layout, path: str, what: str) -> Iterator[Held | None]:
    """Take a lock if nobody has it; yields None where somebody has.

    Raises:
        OSError: as `hold`.
    """
    layout.make_parents(path)
    got = _acquire(layout, path, what, 0.0)
    try:
        yield got[1] if got is not None else None
    finally:
        if got is not None:
            _release(got[0])


def describe_holder(path: str) -> str:
    """Who holds a lock, as far as its record tells."""
    try:
        with open(path, encoding="utf-8") as file:
            record = json.loads(file.read(_RECORD_BYTES))
        since = time.strftime("%H:%M:%S", time.localtime(record["since"]))
        return f"process {record['pid']} on {record['host']} since {since} ({record['what']})"
    except (OSError, ValueError, KeyError, TypeError, OverflowError, RecursionError):
        return "another process"


def _acquire(
    layout: Layout, path: str, what: str, timeout: float, until: Callable[[], bool] | None = None
) -> tuple[BaseFileLock, Held] | None:
    """The lock, acquired, or None if it did not come free in time or before `until`."""
    held = Held(path, None)

    def record(descriptor: int) -> None:
        held.failure = _failure_in(os.pread(descriptor, _RECORD_BYTES, 0))
        # A failure is carried on: several may wait for the same one, and each takes the lock in turn.
        failure = {} if held.failure is None else {"failure": dataclasses.asdict(held.failure)}
        _write(descriptor, {**_record(what), **failure})

    options: dict[str, Any] = {"mode": layout.file_mode, "poll_interval": POLL_SECONDS, "thread_local": False}
    lock: BaseFileLock = FileLock(path, fallback_to_soft=False, on_acquired=record, **options)
    try:
        lock.acquire(timeout=timeout, cancel_check=until)
        return lock, held
    except Timeout:
        return None
    except OSError as error:
        if error.errno not in _WITHOUT_FLOCK:
            raise
    # A file system without flock: filelock's fail-closed lock of owner claims, which never overlaps.
    soft = StrictSoftFileLock(f"{path}.claims", **options)
    try:
        soft.acquire(timeout=timeout, cancel_check=until)
        return soft, held
    except Timeout:
        return None


def _release(lock: BaseFileLock) -> None:
    """Release; a file system that refuses costs nobody a kernel, for the lock goes with its descriptor."""
    with suppress(OSError):
        lock.release()
    if lock.is_locked:
        with suppress(OSError):
            lock.release(force=True)


def _write(descriptor: int, record: dict[str, Any]) -> None:
    """Replace the record; a full disk costs the record, not the lock."""
    with suppress(OSError):
        os.ftruncate(descriptor, 0)
        os.pwrite(descriptor, json.dumps(record).encode(), 0)


def _failure_in(data: bytes) -> Failure | None:
    try:
        values = json.loads(data)["failure"]
        failure = Failure(**values)
    except (ValueError, KeyError, TypeError, RecursionError):
        return None
    kinds = (failure.message, str), (failure.log_path, str), (failure.clock, float), (failure.host, str)
    return failure if all(type(value) is kind for value, kind in kinds) else None


def _record(what: str) -> dict[str, Any]:
    return {
        "pid": os.getpid(),
        "start_time": _start_time(),
        "host": socket.gethostname(),
        "what": what,
        "since": time.time(),
    }


def _start_time() -> int | None:
    """This process's start in clock ticks since boot, which tells a recycled process id apart."""
    try:
        with open("/proc/self/stat", encoding="utf-8", errors="replace") as file:
            return int(file.read().rpartition(")")[2].split()[19])
    except (OSError, ValueError, IndexError):
        return None
