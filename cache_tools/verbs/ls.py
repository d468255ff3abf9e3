"""`muse-cache ls`."""

from collections.abc import Callable
from typing import Any

import click

from cache_tools import clock
from cache_tools.describe import COLUMNS, age_text, as_json_row, columns, plural, printable, used_text, value_text
from cache_tools.opening import open_cache
from cache_tools.select import Selection, selection_options
from cache_tools.standing import Standings
from cache_tools.table import print_line, print_table
from muse_jit.console import OK, cache_dir_option, json_option, print_json, size_text
from muse_jit.store.listing import Listed, listed
from muse_jit.store.lookup import Miss

SORTS = ("kernel", "arch", "size", "compile", "age", "used", "digest")


@click.command()
@selection_options
@click.option("--sort", type=click.Choice(SORTS), default="kernel", show_default=True, help="Order of the entries.")
@click.option("--reverse", is_flag=True, help="The other way round.")
@click.option("--tree", is_flag=True, help="By kernel and architecture: what they share once, then what differs.")
@cache_dir_option
@json_option
def ls(sort: str, reverse: bool, tree: bool, cache_dir: str | None, as_json: bool, **selection: Any) -> int:
    """List the entries: kernel, architecture, size, compile time, age, last use, constants.

    USED is how long ago the last use was, exact to a day; "-" means not since the day it was made. Constants that
    are switches stand there by name when they are on. Entries that cannot be read are listed as damaged.
    """
    wanted = Selection(**selection)
    layout = open_cache(cache_dir)
    standings, now = Standings(layout), clock.now()
    items = [i for i in listed(layout) if wanted.fits(i, standings, now)]
    items.sort(key=_order(sort), reverse=reverse)
    if as_json:
        rows = [as_json_row(i) | {"toolchain": _toolchain(i, standings)} for i in items]
        print_json({"cache_dir": layout.root, "entries": rows})
        return OK
    if tree:
        _print_tree(items, now)
    elif items:
        colours = ["red" if isinstance(i.entry, Miss) else None for i in items]
        rows_of_text = [columns(i, now) for i in items]
        narrow = ("COMPILE", "USED", "AGE", "ARCH", "SIZE")
        print_table(COLUMNS, rows_of_text, optional=narrow, right=("SIZE", "COMPILE", "AGE", "USED"), colours=colours)
    size, disk = sum(i.size for i in items), sum(i.disk for i in items)
    print_line(f"{plural(len(items), 'entry', 'entries')}, {size_text(size)} ({size_text(disk)} on disk) in "
               f"{printable(layout.root)}")  # fmt: skip
    return OK


def _order(sort: str) -> Callable[[Listed], Any]:
    """Damaged entries come first, whatever the order; the largest, slowest, oldest first."""

    def key(item: Listed) -> tuple[Any, ...]:
        if isinstance(item.entry, Miss):
            return (0, "", "", item.digest)
        entry = item.entry
        values: dict[str, Any] = {
            "kernel": entry.kernel,
            "arch": entry.arch,
            "size": -item.size,
            "compile": -entry.compile_seconds,
            "age": entry.created,
            "used": item.last_used or 0.0,
            "digest": item.digest,
        }
        return (1, values[sort], entry.kernel, entry.arch, item.digest)

    return key


def _toolchain(item: Listed, standings: Standings) -> str | None:
    return None if isinstance(item.entry, Miss) else standings.toolchain_digest(item.entry)


def _print_tree(items: list[Listed], now: float) -> None:
    """Kernel and architecture, below it what all of its entries share, below that each with what is its own."""
    groups: dict[tuple[str, str], list[Listed]] = {}
    for item in items:
        name = ("(damaged)", "") if isinstance(item.entry, Miss) else (item.entry.kernel, item.entry.arch)
        groups.setdefault(name, []).append(item)
    for (kernel, arch), members in groups.items():
        total = size_text(sum(i.size for i in members))
        heading = f"{printable(kernel)} {printable(arch)}".strip()
        print_line(f"{heading}  {plural(len(members), 'entry', 'entries')}, {total}", "bold")
        damaged = kernel == "(damaged)" and isinstance(members[0].entry, Miss)
        common = {} if damaged else _common(members)
        if len(members) > 1 and common:
            print_line("  " + " ".join(f"{printable(n)}={value_text(v)}" for n, v in common.items()), "dim")
        hidden = common if len(members) > 1 else {}
        for item in members:
            print_line(_leaf(item, hidden, now), "red" if damaged else None)


def _leaf(item: Listed, hidden: dict[str, Any], now: float) -> str:
    if isinstance(item.entry, Miss):
        return f"    {item.digest[:12]}  {columns(item, now)[-1]}"
    constants = item.entry.key["constants"]
    own = " ".join(f"{printable(n)}={value_text(v)}" for n, v in constants.items() if n not in hidden)
    used = used_text(item, now)
    ages = f"made {age_text(now - item.entry.created)} ago" + ("" if used == "-" else f", used {used} ago")
    return f"    {item.digest[:12]}  {own or '(the same constants, another key: muse-cache diff)'}  [{ages}]"


def _common(members: list[Listed]) -> dict[str, Any]:
    """The constants that are equal, type included, in all of them."""
    sets = [i.entry.key["constants"] for i in members if not isinstance(i.entry, Miss)]
    first = sets[0]
    return {n: v for n, v in first.items() if all(n in s and value_text(s[n]) == value_text(v) for s in sets)}
