"""`muse-cache stats`."""

from typing import Any

import click

from cache_tools.describe import plural, printable, seconds_text
from cache_tools.opening import open_cache
from cache_tools.standing import Standing, Standings
from cache_tools.summary import Group, Summary, summarise
from cache_tools.table import print_line, print_table
from muse_jit.console import OK, cache_dir_option, json_option, print_json, size_text
from muse_jit.store.layout import Layout


@click.command()
@click.option("--top", type=click.IntRange(min=1), default=10, show_default=True, help="Rows of each table.")
@cache_dir_option
@json_option
def stats(top: int, cache_dir: str | None, as_json: bool) -> int:
    """Sums by kernel, architecture and toolchain; compile seconds saved; what is used, dead or damaged.

    Bytes are those on disk, as `du` counts them. Uses are recorded as one stamp an entry that moves at most once a
    day, so they are not counted: USED is how many entries were used on a later day than they were made. DEAD is how
    many cannot be found with the toolchain and source that are installed here.
    """
    layout = open_cache(cache_dir)
    standings = Standings(layout)
    summary = summarise(layout, standings)
    if as_json:
        print_json(_document(layout, summary, standings))
        return OK
    total = summary.total
    print_line(f"{plural(total.entries, 'entry', 'entries')}, {size_text(total.disk)} on disk in "
               f"{printable(layout.root)}", "bold")  # fmt: skip
    if total.entries:
        _print_groups("KERNEL", _by_entries(summary.kernels), top)
        _print_groups("ARCH", _by_entries(summary.arches), top)
        named = {_toolchain_name(d, summary): g for d, g in summary.toolchains.items()}
        _print_groups("TOOLCHAIN", _by_entries(named), top)
        print()
    _print_findings(summary, standings)
    return OK


def _by_entries(groups: dict[str, Group]) -> list[tuple[str, Group]]:
    return sorted(groups.items(), key=lambda pair: (-pair[1].entries, pair[0]))


def _print_groups(title: str, groups: list[tuple[str, Group]], top: int) -> None:
    print()
    rows = [_row(printable(name), group) for name, group in groups[:top]]
    if len(groups) > top:
        rest = Group()
        for _, group in groups[top:]:
            rest.entries += group.entries
            rest.disk += group.disk
            rest.compile_seconds += group.compile_seconds
            rest.used += group.used
            rest.dead += group.dead
        rows.append(_row(f"({len(groups) - top} more)", rest))
    head = ("ENTRIES", "ON DISK", "COMPILE", "USED", "DEAD", title)
    print_table(head, rows, right=head[:-1], optional=("COMPILE", "ON DISK"))


def _row(name: str, group: Group) -> tuple[str, ...]:
    counts = (f"{group.entries:,}", size_text(group.disk), seconds_text(group.compile_seconds))
    return (*counts, f"{group.used:,}", f"{group.dead:,}", name)


def _toolchain_name(digest: str, summary: Summary) -> str:
    """ "1f3a09c2d4e5  nvidia-cutlass-dsl 4.8.1, CUDA 13, x86_64, installed"."""
    known = summary.toolchain_parts[digest]
    dsl = known["parts"].get("nvidia-cutlass-dsl")
    version = f"nvidia-cutlass-dsl {dsl.get('version')}, " if isinstance(dsl, dict) else ""
    installed = ", installed" if known["installed"] else ""
    return f"{digest[:12]}  {version}CUDA {known['cuda']}, {known['host']}{installed}"


def _print_findings(summary: Summary, standings: Standings) -> None:
    total = summary.total
    print_line(f"saved      {seconds_text(total.compile_seconds)} of compiling, each time a process finds all of them")
    print_line(f"used       {total.used:,} of {total.entries:,} on a later day than they were made "
               "(uses are not counted)")  # fmt: skip
    reasons = (
        (Standing.TOOLCHAIN, "of another toolchain (muse-cache prune --toolchain stale removes them)"),
        (Standing.SOURCE, "of a source that changed since"),
    )
    dead = [f"{summary.standings[s]:,} {text}" for s, text in reasons if summary.standings.get(s)]
    print_line(f"dead       {', '.join(dead) or '0'}", "yellow" if dead else None)
    if summary.standings.get(Standing.UNKNOWN):
        why = standings.why_unknown or "no installed package registers their kernel family"
        print_line(f"unknown    {summary.standings[Standing.UNKNOWN]:,}: whether they are dead cannot be told ({why})")
    found = ", ".join(f"{count:,} {reason}" for reason, count in sorted(summary.damaged.items()))
    size = f" ({found}; {size_text(summary.damaged_disk)}; muse-cache verify names them)" if found else ""
    print_line(f"damaged    {sum(summary.damaged.values()):,}{size}", "red" if found else None)
    beside = summary.outside
    print_line(f"set aside  {summary.set_aside:,} ({size_text(beside['set_aside'])}): damaged entries and logs of "
               "failed compiles, kept a week")  # fmt: skip
    print_line(f"folder     {size_text(summary.disk)} on disk in all: entries {size_text(total.disk)}, staging "
               f"{size_text(beside['staging'])}, locks and folders {size_text(beside['folders'])}")  # fmt: skip


def _document(layout: Layout, summary: Summary, standings: Standings) -> dict[str, Any]:
    return {
        "cache_dir": layout.root,
        **summary.total.as_dict(),
        "kernels": [{"kernel": name, **group.as_dict()} for name, group in _by_entries(summary.kernels)],
        "arches": [{"arch": name, **group.as_dict()} for name, group in _by_entries(summary.arches)],
        "toolchains": [
            {"toolchain": name, **group.as_dict(), **summary.toolchain_parts[name]}
            for name, group in _by_entries(summary.toolchains)
        ],
        "standings": {str(standing): summary.standings.get(standing, 0) for standing in Standing},
        "standing_unknown_because": standings.why_unknown or None,
        "damaged": {"entries": sum(summary.damaged.values()), "disk": summary.damaged_disk, "reasons": summary.damaged},
        "set_aside": {"entries": summary.set_aside, "disk": summary.outside["set_aside"]},
        "staging_disk": summary.outside["staging"],
        "folders_disk": summary.outside["folders"],
        "total_disk": summary.disk,
    }
