"""`muse-cache prune`."""

from collections.abc import Callable
from typing import Any

import click

from cache_tools import clock
from cache_tools.describe import age_text, plural, printable
from cache_tools.opening import layout_of, must_be_cache, must_exist, settings_of
from cache_tools.quantities import age, size
from cache_tools.select import TOOLCHAIN_HELP, Selection
from cache_tools.standing import Standings
from cache_tools.table import print_line
from cache_tools.verbs.verify import check
from muse_jit.console import FAILED, OK, cache_dir_option, json_option, print_json, size_text
from muse_jit.errors import CacheUnusable
from muse_jit.store.layout import Layout
from muse_jit.store.listing import Listed, listed
from muse_jit.store.lookup import Miss
from muse_jit.store.prune import SET_ASIDE_SECONDS, PruneReport, Usage
from muse_jit.store.prune import prune as prune_store

_LINES = 50
"""So many entries are named one by one."""


@click.command()
@click.option("--max-size", metavar="SIZE", callback=size, help="Least recently used first, until so much is left: 2G.")
@click.option("--older-than", metavar="AGE", callback=age, help="Those last used, or made, longer ago: 12h, 30d, 2w.")
@click.option("--kernel", help="Only entries of one kernel family.")
@click.option("--arch", help="Only entries for one GPU architecture.")
@click.option("--toolchain", help="Only " + TOOLCHAIN_HELP)
@click.option("--damaged", is_flag=True, help="Only entries that verify finds damaged.")
@click.option("--dry-run", is_flag=True, help="Say what would be deleted; change nothing.")
@cache_dir_option
@json_option
def prune(
    max_size: int | None,
    older_than: float | None,
    damaged: bool,
    dry_run: bool,
    cache_dir: str | None,
    as_json: bool,
    **only: Any,
) -> int:
    """Delete entries: by size, age, kernel, architecture, toolchain, or those that are damaged.

    --kernel, --arch, --toolchain and --damaged say which entries may go; --older-than and --max-size how many of
    them. Without these two, all that may go. Without any option, prunes to MUSE_JIT_MAX_BYTES, as publishing does.
    What killed builders left behind goes in any case. Deleting is safe at any time: processes that run keep what
    they loaded, and what is asked for again is compiled again.
    """
    settings = settings_of(cache_dir)
    layout, _ = layout_of(settings)
    must_exist(layout)
    must_be_cache(layout)
    allowed = _allowed(layout, Selection(**only), damaged)
    if max_size is None and older_than is None:
        max_size = settings.max_bytes if allowed is None else 0
    names = {i.digest: i for i in listed(layout)} if not as_json else {}
    report = run(layout, max_size, older_than, allowed, dry_run)
    if as_json:
        print_json(as_document(layout, report, dry_run))
        return FAILED if report.busy else OK
    _print_removed(report, dry_run, names)
    print_sums(layout, report, dry_run)
    return FAILED if report.busy else OK


def run(
    layout: Layout,
    max_bytes: int | None,
    older_than: float | None,
    allowed: Callable[[Usage], bool] | None,
    dry_run: bool,
    everything: bool = False,
) -> PruneReport:
    """Prune the store; with `everything` what was set aside goes, too, however new.

    Raises:
        CacheUnusable: the folder cannot be written or is not to be trusted.
    """
    layout.check_trust()
    try:
        return prune_store(
            layout,
            max_bytes=max_bytes,
            older_than=older_than,
            only=allowed,
            dry_run=dry_run,
            now=clock.now(),
            set_aside_seconds=-1.0 if everything else SET_ASIDE_SECONDS,
        )
    except OSError as error:
        raise CacheUnusable(f"{layout.root} cannot be pruned: {error.strerror}; who owns it can") from None


def _allowed(layout: Layout, only: Selection, damaged: bool) -> Callable[[Usage], bool] | None:
    """Which entries may go; None for all of them."""
    if only == Selection() and not damaged:
        return None
    standings, now = Standings(layout), clock.now()
    chosen = set()
    for item in listed(layout):
        if only.fits(item, standings, now) and not (damaged and not _is_damaged(layout, item)):
            chosen.add(item.digest)
    return lambda usage: usage.digest in chosen


def _is_damaged(layout: Layout, item: Listed) -> bool:
    return isinstance(item.entry, Miss) or check(layout, item.digest)[0].status == "damaged"


def as_document(layout: Layout, report: PruneReport, dry_run: bool) -> dict[str, Any]:
    """The fields of `prune --json` and `clear --json`."""
    return {
        "cache_dir": layout.root,
        "dry_run": dry_run,
        "removed": [{"digest": u.digest, "disk": u.size, "last_used": u.last_used} for u in report.removed],
        "removed_disk": sum(u.size for u in report.removed),
        "kept_entries": report.kept_entries,
        "kept_disk": report.kept_bytes,
        "litter": report.litter,
        "busy": report.busy,
    }


def _print_removed(report: PruneReport, dry_run: bool, names: dict[Any, Listed]) -> None:
    """What went, or would go, an entry a line; of very many the first."""
    now, word = clock.now(), "would delete" if dry_run else "deleted"
    for usage in report.removed[:_LINES]:
        item = names.get(usage.digest)
        entry = None if item is None or isinstance(item.entry, Miss) else item.entry
        what = f"{printable(entry.kernel)} {printable(entry.arch)}" if entry else "(damaged)"
        print_line(f"{word}  {usage.digest[:12]}  {size_text(usage.size)}  "
                   f"idle {age_text(abs(now - usage.last_used))}  {what}")  # fmt: skip
    if len(report.removed) > _LINES:
        print_line(f"{word}  {len(report.removed) - _LINES:,} more (--json names all)")


def print_sums(layout: Layout, report: PruneReport, dry_run: bool) -> None:
    """What went, or would go, and what stays, in one line."""
    if report.busy:
        print_line("another process is pruning this cache right now; nothing was done", "yellow")
        return
    word = "would delete" if dry_run else "deleted"
    freed = size_text(sum(u.size for u in report.removed))
    litter = f" and {plural(report.litter, 'leftover folder')}" if report.litter else ""
    kept = f"{plural(report.kept_entries, 'entry', 'entries')}, {size_text(report.kept_bytes)}"
    print_line(f"{word} {plural(len(report.removed), 'entry', 'entries')}, {freed}{litter}; "
               f"{'would keep' if dry_run else 'kept'} {kept} in {printable(layout.root)}")  # fmt: skip
