"""Go through what is in the cache, without reading artifacts and without trusting what is found."""

import dataclasses
import os
import re
import stat
from collections.abc import Iterator
from contextlib import suppress

from muse_jit.key.encoding import KeyDigest
from muse_jit.store.entry import Entry
from muse_jit.store.layout import Layout
from muse_jit.store.lookup import Miss, read_manifest

_DIGEST = re.compile(r"[0-9a-f]{64}")


@dataclasses.dataclass(frozen=True)
class Listed:
    """One folder below entries-v1: its manifest, or why there is none."""

    digest: KeyDigest
    entry: Entry | Miss
    size: int
    """Bytes of its files."""
    path: str


def listed(layout: Layout, prefix: str = "") -> Iterator[Listed]:
    """The entries whose digest begins with `prefix`, by digest. Foreign files are passed over; what vanishes
    meanwhile is left out; an absent or unreadable cache has no entries."""
    for digest in digests(layout, prefix):
        path = layout.entry(digest)
        size = 0
        with suppress(OSError), os.scandir(path) as files:
            for file in files:
                status = file.stat(follow_symlinks=False)
                size += status.st_size if stat.S_ISREG(status.st_mode) else 0
        entry = read_manifest(layout, digest)
        if isinstance(entry, Miss) and not os.path.lexists(path):
            continue
        yield Listed(digest, entry, size, path)


def digests(layout: Layout, prefix: str = "") -> Iterator[KeyDigest]:
    """The names of the entry folders that begin with `prefix`, sorted."""
    for shard in _names(layout.entries):
        if len(shard) == 2 and (shard.startswith(prefix[:2]) or prefix.startswith(shard)):
            for name in _names(os.path.join(layout.entries, shard)):
                if name.startswith(prefix) and name.startswith(shard) and _DIGEST.fullmatch(name):
                    yield KeyDigest(name)


def _names(path: str) -> list[str]:
    try:
        return sorted(os.listdir(path))
    except OSError:
        return []
