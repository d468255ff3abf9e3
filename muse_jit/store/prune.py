"""Keep the cache within bounds: remove what was used longest ago, and what killed builders left behind.

An entry is removed by one rename out of its place, then deleted, so a reader finds it whole or not at all; kernels
that are loaded live on in memory. One pruner works at a time; what vanishes under it counts as freed. Ages are
distances from now, so a stamp from 1970 or from next year is old, not eternal.
"""

import dataclasses
import os
import shutil
import time
from collections.abc import Callable
from contextlib import suppress

from muse_jit.key.encoding import KeyDigest
from muse_jit.store.layout import MANIFEST, SET_ASIDE, STAGING, Layout
from muse_jit.store.listing import digests, disk_bytes
from muse_jit.store.lock import try_lock

TOUCH_SECONDS = 86400.0
"""A hit moves an entry's last-use stamp at most so often."""

STAGING_SECONDS = 3600.0
"""A staging folder lives for the milliseconds of a publish; older ones are of killed builders."""

SET_ASIDE_SECONDS = 7 * 86400.0
"""Damaged entries and logs of failed compiles are kept so long to look at."""


@dataclasses.dataclass(frozen=True)
class Usage:
    """What one entry takes and when it was last used."""

    digest: KeyDigest
    size: int
    """Bytes on disk, as `du` counts them."""
    last_used: float
    """Seconds since the epoch."""


@dataclasses.dataclass
class PruneReport:
    """What a prune did; with `dry_run` what it would do."""

    removed: list[Usage] = dataclasses.field(default_factory=list)
    kept_entries: int = 0
    kept_bytes: int = 0
    litter: int = 0
    """Staging and set-aside folders removed."""
    busy: bool = False
    """Another pruner was at work, so nothing was done."""


def touch(layout: Layout, digest: KeyDigest, last_used: float, now: float) -> None:
    """Note that an entry is in use, at most once a day; silent where that cannot be written."""
    if abs(now - last_used) >= TOUCH_SECONDS:
        with suppress(OSError):
            os.utime(os.path.join(layout.entry(digest), MANIFEST), (now, now), follow_symlinks=False)


def usages(layout: Layout) -> list[Usage]:
    """Every entry's size and last use; what vanishes meanwhile is left out."""
    found = []
    for digest in digests(layout):
        size, stamp = 0, 0.0
        with suppress(OSError):
            folder = layout.entry(digest)
            own = os.lstat(folder)
            size, stamp = disk_bytes(own), own.st_mtime
            with os.scandir(folder) as files:
                for file in files:
                    status = file.stat(follow_symlinks=False)
                    size += disk_bytes(status)
                    stamp = status.st_mtime if file.name == MANIFEST else stamp
            found.append(Usage(digest, size, stamp))
    return found


def prune(
    layout: Layout,
    *,
    max_bytes: int | None = None,
    older_than: float | None = None,
    only: Callable[[Usage], bool] | None = None,
    dry_run: bool = False,
    now: float | None = None,
    set_aside_seconds: float = SET_ASIDE_SECONDS,
) -> PruneReport:
    """Remove entries not used for `older_than` seconds, then the least recently used until `max_bytes` are left.

    `only` limits what may be removed. Litter of killed builders goes in any case, and what was set aside more than
    `set_aside_seconds` ago.

    Raises:
        OSError: the cache folder cannot be written.
    """
    report = PruneReport()
    now = time.time() if now is None else now
    lock = os.path.join(layout.locks, "prune.lock")
    with try_lock(layout, lock, "pruning") as taken:
        if not taken:
            return PruneReport(busy=True)
        entries = sorted(usages(layout), key=lambda u: -abs(now - u.last_used))
        total = sum(u.size for u in entries)
        for usage in entries:
            too_old = older_than is not None and abs(now - usage.last_used) > older_than
            too_much = max_bytes is not None and total > max_bytes
            if (too_old or too_much) and (only is None or only(usage)):
                if not dry_run:
                    _remove(layout, layout.entry(usage.digest))
                total -= usage.size
                report.removed.append(usage)
        report.kept_entries, report.kept_bytes = len(entries) - len(report.removed), total
        report.litter = sweep(layout, now, dry_run=dry_run, set_aside_seconds=set_aside_seconds)
    return report


def sweep(layout: Layout, now: float, *, dry_run: bool = False, set_aside_seconds: float = SET_ASIDE_SECONDS) -> int:
    """Remove old staging and set-aside folders; returns how many."""
    count = 0
    for kind, limit in ((STAGING, STAGING_SECONDS), (SET_ASIDE, set_aside_seconds)):
        folder = os.path.join(layout.root, kind)
        with suppress(OSError):
            for name in os.listdir(folder):
                path = os.path.join(folder, name)
                with suppress(OSError):
                    if abs(now - os.lstat(path).st_mtime) > limit:
                        count += 1
                        if not dry_run:
                            # Out of the way by one rename: a builder that was stopped and goes on must not publish
                            # a folder that is half deleted.
                            grave = layout.unique(STAGING)
                            layout.make_parents(grave)
                            os.rename(path, grave)
                            _delete(grave)
    return count


def _remove(layout: Layout, path: str) -> None:
    """Out of its place by one rename, then deleted. Somebody else may have been first."""
    grave = layout.unique(STAGING)
    layout.make_parents(grave)
    with suppress(FileNotFoundError):
        os.rename(path, grave)
    _delete(grave)


def _delete(path: str) -> None:
    """A folder or a file; what cannot be deleted now is swept another time."""
    if os.path.isdir(path) and not os.path.islink(path):
        shutil.rmtree(path, ignore_errors=True)
    else:
        with suppress(OSError):
            os.unlink(path)
