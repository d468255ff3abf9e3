"""Step 4 of the path: hold a key while compiling it, so that one process of a host does and the others wait.

The lock is the kernel's (`flock`, through filelock): it is freed the moment its holder dies, however it dies, and a
lock file left behind delays nobody. The holder's record is for people; liveness never rests on it.

A holder can also stop without dying (SIGSTOP, a hung file system). A waiter gives it `stall_limit` seconds; then one
waiter takes the key's takeover lock and compiles, and the others wait for that one. At most two compiles in all.

filelock is imported here only, and this module only on a miss: importing it takes 44 ms.
"""

import errno
import json
import os
import socket
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from filelock import BaseFileLock, FileLock, StrictSoftFileLock, Timeout

from muse_jit.key.encoding import KeyDigest
from muse_jit.store.layout import Layout

POLL_SECONDS = 0.05
"""How often a waiter tries: 0.6 % of a core, measured with eight waiters."""

_WITHOUT_FLOCK = (errno.ENOLCK, errno.ENOTSUP, errno.EOPNOTSUPP, errno.ENOSYS)


class LockTimeout(Exception):
    """Neither the lock nor the takeover lock came free within the limit. `holder` is what its record says."""

    def __init__(self, path: str, holder: str) -> None:
        super().__init__(f"{path} is held by {holder}")
        self.path = path
        self.holder = holder


@contextmanager
def hold(
    layout: Layout,
    digest: KeyDigest,
    what: str,
    stall_limit: float,
    on_wait: Callable[[str], None] | None = None,
) -> Iterator[None]:
    """Hold the lock of one key. `on_wait` is called once, with a description of the holder, before waiting.

    Raises:
        OSError: the lock file cannot be made or locked (read-only folder, full disk, no locks on this file system).
        LockTimeout: the holder and the one that took over both stalled.
    """
    path = layout.lock(digest)
    layout.make_parents(path)
    lock = _acquire(layout, path, what, 0.0)
    if lock is None:
        if on_wait is not None:
            on_wait(describe_holder(path))
        lock = _acquire(layout, path, what, stall_limit)
    if lock is None:
        path = layout.lock(digest, "takeover.lock")
        lock = _acquire(layout, path, what, stall_limit)
    if lock is None:
        raise LockTimeout(path, describe_holder(path))
    try:
        yield
    finally:
        lock.release()


def describe_holder(path: str) -> str:
    """Who holds a lock, as far as its record tells."""
    try:
        with open(path, encoding="utf-8") as file:
            record = json.loads(file.read(4096))
        since = time.strftime("%H:%M:%S", time.localtime(record["since"]))
        return f"process {record['pid']} on {record['host']} since {since} ({record['what']})"
    except (OSError, ValueError, KeyError, TypeError):
        return "another process"


def _acquire(layout: Layout, path: str, what: str, timeout: float) -> BaseFileLock | None:
    """The lock, acquired, or None if it did not come free in time."""

    def record(descriptor: int) -> None:
        text = json.dumps(_record(what)).encode()
        os.ftruncate(descriptor, 0)
        os.pwrite(descriptor, text, 0)

    options: dict[str, Any] = {"mode": layout.file_mode, "poll_interval": POLL_SECONDS, "thread_local": False}
    lock: BaseFileLock = FileLock(path, fallback_to_soft=False, on_acquired=record, **options)
    try:
        lock.acquire(timeout=timeout)
        return lock
    except Timeout:
        return None
    except OSError as error:
        if error.errno not in _WITHOUT_FLOCK:
            raise
    # A file system without flock: filelock's fail-closed lock of owner claims, which never overlaps.
    soft = StrictSoftFileLock(f"{path}.claims", **options)
    try:
        soft.acquire(timeout=timeout)
        return soft
    except Timeout:
        return None


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
