"""Go through what is in the cache, without reading artifacts and without trusting what is found.

A cache may have 100,000 entries: each is one folder opened below its parent's descriptor, its files asked for their
sizes, and one manifest read. Nothing is kept of it but what is handed on.
"""

import dataclasses
import os
import re
import stat
from collections.abc import Iterator
from contextlib import suppress

from muse_jit.key.encoding import KeyDigest
from muse_jit.store.entry import Entry
from muse_jit.store.layout import ARTIFACT, ENTRIES, MANIFEST, SET_ASIDE, STAGING, Layout
from muse_jit.store.lookup import Miss, Reason, manifest_in

_DIGEST = re.compile(r"[0-9a-f]{64}")
_FOLDER = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC


@dataclasses.dataclass(frozen=True, slots=True)
class Listed:
    """One folder below entries-v1: its manifest, or why there is none."""

    digest: KeyDigest
    entry: Entry | Miss
    size: int
    """Bytes of its files."""
    path: str
    disk: int = 0
    """Bytes it takes on disk, its folder included, as `du` counts them."""
    last_used: float | None = None
    """Seconds since the epoch, exact to a day; None where it has no manifest."""


def listed(layout: Layout, prefix: str = "") -> Iterator[Listed]:
    """The entries whose digest begins with `prefix`, by digest. Foreign files are passed over; what vanishes
    meanwhile is left out; an absent or unreadable cache has no entries. Below the root no link is followed."""
    for shard in _shards(layout, prefix):
        try:
            descriptor = os.open(os.path.join(layout.entries, shard), _FOLDER)
        except OSError:
            continue
        try:
            for digest in _digests_in(descriptor, shard, prefix):
                item = _listed_in(layout, descriptor, digest)
                if item is not None:
                    yield item
        finally:
            os.close(descriptor)


def digests(layout: Layout, prefix: str = "") -> Iterator[KeyDigest]:
    """The names of the entry folders that begin with `prefix`, sorted."""
    for shard in _shards(layout, prefix):
        yield from _digests_in(os.path.join(layout.entries, shard), shard, prefix)


def disk_bytes(status: os.stat_result) -> int:
    """What a file or folder takes on disk, as `du` counts it."""
    return status.st_blocks * 512


def tree_bytes(path: str) -> int:
    """What lies below a folder takes on disk, without the folder itself; what cannot be read counts as nothing."""
    total = 0
    with suppress(OSError), os.scandir(path) as items:
        for item in items:
            total += _item_bytes(item)
    return total


def outside(layout: Layout) -> tuple[dict[str, int], int]:
    """What the cache takes on disk beside the entries that `listed` gives, and how many folders are set aside.

    Bytes of "set_aside", "staging", and "folders": locks, the folders themselves, small files, foreign files. With
    the entries they come to what `du` says of the root.
    """
    bytes_of = {"set_aside": 0, "staging": 0, "folders": 0}
    names = {SET_ASIDE: "set_aside", STAGING: "staging"}
    with suppress(OSError):
        bytes_of["folders"] += disk_bytes(os.stat(layout.root))
        with os.scandir(layout.root) as items:
            for item in items:
                if item.name == ENTRIES and item.is_dir(follow_symlinks=False):
                    bytes_of["folders"] += disk_bytes(item.stat(follow_symlinks=False)) + _strays(item.path)
                else:
                    bytes_of[names.get(item.name, "folders")] += _item_bytes(item)
    return bytes_of, len(_names(os.path.join(layout.root, SET_ASIDE)))


def _strays(entries: str) -> int:
    """Bytes of the folders around the entries and of whatever else lies there."""
    total = 0
    with suppress(OSError), os.scandir(entries) as shards:
        for shard in shards:
            if len(shard.name) != 2 or not shard.is_dir(follow_symlinks=False):
                total += _item_bytes(shard)
                continue
            with suppress(OSError), os.scandir(shard.path) as items:
                total += disk_bytes(shard.stat(follow_symlinks=False))
                for item in items:
                    if not (item.name.startswith(shard.name) and _DIGEST.fullmatch(item.name)):
                        total += _item_bytes(item)
    return total


def _item_bytes(item: "os.DirEntry[str]") -> int:
    try:
        own = disk_bytes(item.stat(follow_symlinks=False))
        return own + (tree_bytes(item.path) if item.is_dir(follow_symlinks=False) else 0)
    except OSError:
        return 0


def _shards(layout: Layout, prefix: str) -> list[str]:
    names = _names(os.path.join(layout.root, ENTRIES))
    return [n for n in names if len(n) == 2 and (n.startswith(prefix[:2]) or prefix.startswith(n))]


def _digests_in(folder: int | str, shard: str, prefix: str) -> Iterator[KeyDigest]:
    for name in _names(folder):
        if name.startswith(prefix) and name.startswith(shard) and _DIGEST.fullmatch(name):
            yield KeyDigest(name)


def _listed_in(layout: Layout, shard: int, digest: KeyDigest) -> Listed | None:
    """One entry of a shard; None if it is gone.

    One that is pruned or replaced while it is read looks damaged: a second look finds its successor, or nothing.
    """
    item = _listed_once(layout, shard, digest)
    return _listed_once(layout, shard, digest) if item is not None and isinstance(item.entry, Miss) else item


def _listed_once(layout: Layout, shard: int, digest: KeyDigest) -> Listed | None:
    path = f"{layout.root}/{ENTRIES}/{digest[:2]}/{digest}"
    try:
        folder = os.open(digest, _FOLDER, dir_fd=shard)
    except FileNotFoundError:
        return None
    except OSError as error:
        return _unopened(path, shard, digest, error)
    try:
        size, disk, last_used, artifact = 0, disk_bytes(os.fstat(folder)), None, None
        with suppress(OSError), os.scandir(folder) as files:
            for file in files:
                status = file.stat(follow_symlinks=False)
                disk += disk_bytes(status)
                if stat.S_ISDIR(status.st_mode):  # nobody of this package made it
                    disk += tree_bytes(os.path.join(path, file.name))
                if stat.S_ISREG(status.st_mode):
                    size += status.st_size
                    if file.name == MANIFEST:
                        last_used = status.st_mtime
                    elif file.name == ARTIFACT:
                        artifact = status.st_size
        entry = manifest_in(folder, digest)
    finally:
        os.close(folder)
    if isinstance(entry, Entry) and artifact != entry.artifact_size:
        entry = _without_library(entry, artifact)
    return Listed(digest, entry, size, path, disk, last_used)


def _without_library(entry: Entry, size: int | None) -> Miss:
    """What a look-up would say of a library that is missing or of another size; its bytes are not read here."""
    if size is None:
        return Miss(Reason.INCOMPLETE, f"{ARTIFACT} is missing")
    return Miss(Reason.TRUNCATED, f"{ARTIFACT} has {size} bytes, published were {entry.artifact_size}")


def _unopened(path: str, shard: int, digest: KeyDigest, error: OSError) -> Listed | None:
    """Something that is no folder, or one that this user may not open."""
    try:
        status = os.stat(digest, dir_fd=shard, follow_symlinks=False)
    except OSError:
        return None
    size = status.st_size if stat.S_ISREG(status.st_mode) else 0
    return Listed(digest, Miss(Reason.UNREADABLE, f"{error.strerror} ({path})"), size, path, disk_bytes(status))


def _names(folder: int | str) -> list[str]:
    try:
        return sorted(os.listdir(folder))
    except OSError:
        return []
