"""Step 6 of the path: make an entry appear, whole, by one rename.

kernel.so and entry.json are written into a private staging folder below the cache (the same file system), flushed
with their folder, then the folder is renamed to its final place and the parent flushed. A process killed at any
point leaves an entry or none, and perhaps a staging folder that a later sweep removes. Nothing is edited in place.
"""

import errno
import json
import os
import shutil
import stat
import time
from typing import Any

from muse_jit.key.encoding import KeyDigest, key_digest
from muse_jit.key.target import CUDA_MAJORS
from muse_jit.key.toolchain import Toolchain
from muse_jit.store.entry import Entry
from muse_jit.store.layout import ARTIFACT, MANIFEST, SET_ASIDE, STAGING, Layout, flush_folder
from muse_jit.store.lookup import PASSING, Hit, Miss, read_entry

_TRIES = 3
_RECORDS_BYTES = 1 << 20  # a record has 1.5 KiB
_RECORDS_TRIES = 40  # of lock.POLL_SECONDS: the lock is held for one small write


def publish(layout: Layout, entry: Entry, artifact: bytes, replaced: Miss | None = None) -> Entry:
    """Store one entry. Returns what is stored afterwards: this entry, or a valid one that was there first.

    `replaced` is the entry that this one is to replace, however sound: set aside right before the rename.

    Raises:
        OSError: it could not be stored (no space, no permission, ...); nothing of it is left behind.
        CacheUnusable: the cache folder cannot be trusted.
    """
    layout.create()
    staging = layout.unique(STAGING)
    final = layout.entry(entry.digest)
    layout.make_parents(staging)
    try:
        layout.make_folder(staging)
        layout.write_new(os.path.join(staging, ARTIFACT), artifact)
        layout.write_new(os.path.join(staging, MANIFEST), entry.to_json())
        flush_folder(staging)
        layout.make_parents(final)
        if replaced is not None:
            set_aside(layout, entry.digest, replaced)
        return _commit(layout, entry, staging, final)
    finally:
        shutil.rmtree(staging, ignore_errors=True)


def _commit(layout: Layout, entry: Entry, staging: str, final: str) -> Entry:
    for attempt in range(_TRIES):
        try:
            os.rename(staging, final)
            flush_folder(os.path.dirname(final))
            return entry
        except OSError as error:
            if error.errno in PASSING and attempt < _TRIES - 1:
                time.sleep(0.05 * (attempt + 1))
                continue
            if error.errno not in (errno.ENOTEMPTY, errno.EEXIST, errno.ENOTDIR):
                raise
        # Another builder was first (after a takeover, or without locks), or a damaged entry stands in the way.
        there = read_entry(layout, entry.digest)
        if isinstance(there, Hit):
            return there.entry
        set_aside(layout, entry.digest, there)
    raise OSError(errno.EEXIST, "an unusable entry stands in the way and cannot be set aside", final)


def set_aside(layout: Layout, digest: KeyDigest, miss: Miss) -> str | None:
    """Move the very entry that was found damaged out of the way; None if it is gone or is another by now.

    The folder's inode is compared, so that an entry published in the meantime stays.
    """
    source = layout.entry(digest)
    target = layout.unique(SET_ASIDE, f"{digest}-")
    try:
        if miss.inode is None or os.lstat(source).st_ino != miss.inode:
            return None
        layout.make_parents(target)
        os.rename(source, target)
    except OSError:
        return None
    return target


def keep_log(layout: Layout, digest: KeyDigest, log: str) -> str | None:
    """Keep the log of a failed compile among what was set aside; its path, or None if it cannot be written."""
    folder = layout.unique(SET_ASIDE, f"{digest}-")
    path = os.path.join(folder, "compile.log")
    try:
        layout.create()
        layout.make_parents(path)
        layout.write_new(path, log.encode("utf-8", "replace"))
    except OSError:
        return None
    return path


def recorded_toolchains(layout: Layout) -> list[dict[str, Any]]:
    """The records of toolchain.json; empty where there is none or it cannot be understood."""
    try:
        descriptor = os.open(layout.toolchains, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
        with open(descriptor, "rb") as file:  # not a pipe that nobody writes to, and not a file without end
            status = os.fstat(descriptor)
            if not stat.S_ISREG(status.st_mode) or status.st_size > _RECORDS_BYTES:
                return []
            records = json.load(file)["toolchains"]
        return [r for r in records if _is_record(r)]
    except (OSError, ValueError, KeyError, TypeError, RecursionError):
        return []


def record_toolchain(layout: Layout, toolchain: Toolchain, created: float) -> None:
    """Add the toolchain that filled the cache to toolchain.json, once.

    The file is read, added to and replaced under a lock, so that two toolchains recorded at once are both kept.

    Raises:
        OSError: it cannot be written, or somebody holds its lock for long.
    """

    def known() -> list[dict[str, Any]] | None:
        records = recorded_toolchains(layout)
        return None if any(r["digest"] == toolchain.digest for r in records) else records

    if known() is None:
        return
    from muse_jit.store.lock import POLL_SECONDS, try_lock

    path = os.path.join(layout.locks, "toolchain.lock")
    for _ in range(_RECORDS_TRIES):
        with try_lock(layout, path, "recording the toolchain") as mine:
            if mine:
                records = known()
                if records is not None:
                    document = {"schema": 1, "toolchains": [*records, toolchain.record(created)]}
                    data = json.dumps(document, indent=1, sort_keys=True).encode() + b"\n"
                    layout.write_whole(layout.toolchains, data)
                return
        time.sleep(POLL_SECONDS)
    raise OSError(errno.ETIMEDOUT, "the lock of the toolchain's record did not come free", path)


def _is_record(record: Any) -> bool:
    kinds = {"digest": str, "cuda": int, "host": str, "parts": dict, "recorded": float}
    if not isinstance(record, dict) or any(type(record.get(name)) is not kind for name, kind in kinds.items()):
        return False
    try:
        return record["cuda"] in CUDA_MAJORS and key_digest(record["parts"]) == record["digest"]
    except (ValueError, RecursionError):
        return False
