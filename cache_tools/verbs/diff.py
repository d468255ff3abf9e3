"""`muse-cache diff`."""

import os
from typing import Any

import click

from cache_tools.describe import constants_text, damage_text, plural, printable
from cache_tools.details import RESOURCES, entry_name
from cache_tools.opening import is_prefix, open_cache, pick, read_whole
from cache_tools.table import print_line, print_table
from cache_tools.verbs.explain import print_differences
from muse_jit.console import FAILED, OK, cache_dir_option, json_option, print_json
from muse_jit.errors import MuseJitError, UsageError
from muse_jit.key.difference import Difference, difference
from muse_jit.store.entry import Entry
from muse_jit.store.layout import Layout
from muse_jit.store.listing import Listed, listed
from muse_jit.store.lookup import Hit, Miss


@click.command()
@click.argument("a")
@click.argument("b")
@click.option("--all-parts", is_flag=True, help="Every leaf of the keys that differs, also those inside toolchains.")
@cache_dir_option
@json_option
def diff(a: str, b: str, all_parts: bool, cache_dir: str | None, as_json: bool) -> int:
    """Compare two entries, or two caches.

    A and B are the first digits of two digests: shows how constants, resources and instruction mix changed from A to
    B. Or they are two cache folders: shows what only one of them has, and keys whose bytes differ.
    """
    folders = [(os.path.isdir(x) and not is_prefix(x)) or os.sep in x for x in (a, b)]
    if folders[0] != folders[1]:
        raise UsageError(f"diff compares two entries or two cache folders, not {a!r} with {b!r}")
    if folders[0]:
        return _diff_caches(open_cache(os.path.abspath(a)), open_cache(os.path.abspath(b)), as_json)
    layout = open_cache(cache_dir)
    return _diff_entries(layout, pick(layout, a), pick(layout, b), all_parts, as_json)


def _diff_caches(a: Layout, b: Layout, as_json: bool) -> int:
    sides = [{item.digest: item for item in listed(layout)} for layout in (a, b)]
    only = [[i for d, i in sides[n].items() if d not in sides[1 - n]] for n in (0, 1)]
    both = [(sides[0][d], sides[1][d]) for d in sides[0] if d in sides[1]]
    differing = [(x, y) for x, y in both if _bytes_differ(x, y)]
    damaged = [[i for i in side.values() if isinstance(i.entry, Miss)] for side in sides]
    if as_json:
        print_json(
            {
                "a": a.root,
                "b": b.root,
                "only_a": [_brief(i) for i in only[0]],
                "only_b": [_brief(i) for i in only[1]],
                "both": len(both),
                "bytes_differ": [x.digest for x, _ in differing],
                "damaged_a": [i.digest for i in damaged[0]],
                "damaged_b": [i.digest for i in damaged[1]],
            }
        )
    else:
        print_line(f"a  {printable(a.root)}  {plural(len(sides[0]), 'entry', 'entries')}", "bold")
        print_line(f"b  {printable(b.root)}  {plural(len(sides[1]), 'entry', 'entries')}", "bold")
        for mark, items in zip("ab", only, strict=True):
            for item in items:
                print_line(f"only in {mark}    {_line(item)}")
        for x, _ in differing:
            print_line(f"bytes differ {_line(x)}", "red")
        print_line(f"{len(both)} in both, {len(only[0])} only in a, {len(only[1])} only in b, "
                   f"{len(differing)} with other bytes, {len(damaged[0]) + len(damaged[1])} damaged")  # fmt: skip
    return FAILED if differing or damaged[0] or damaged[1] else OK


def _bytes_differ(x: Listed, y: Listed) -> bool:
    """Whether two sound entries of one key were published with different libraries."""
    if isinstance(x.entry, Miss) or isinstance(y.entry, Miss):
        return False
    return x.entry.artifact_digest != y.entry.artifact_digest


def _line(item: Listed) -> str:
    if isinstance(item.entry, Miss):
        return f"{item.digest[:12]}  (damaged) {damage_text(item.entry)}"
    entry = item.entry
    constants = constants_text(entry.key["constants"])
    return f"{item.digest[:12]}  {printable(entry.kernel)} {printable(entry.arch)}  {constants}"


def _brief(item: Listed) -> dict[str, Any]:
    if isinstance(item.entry, Miss):
        return {"digest": item.digest, "kernel": None, "arch": None, "damaged": damage_text(item.entry)}
    return {"digest": item.digest, "kernel": item.entry.kernel, "arch": item.entry.arch, "damaged": None}


def _diff_entries(layout: Layout, a: Listed, b: Listed, all_parts: bool, as_json: bool) -> int:
    hits = [read_whole(layout, item.digest) for item in (a, b)]
    for item, hit in zip((a, b), hits, strict=True):
        if isinstance(hit, Miss):
            raise MuseJitError(f"{item.digest[:12]} is damaged ({damage_text(hit)}) and is not compared")
    found = [hit for hit in hits if isinstance(hit, Hit)]
    old, new = found[0].entry, found[1].entry
    parts = difference(old.key, new.key)
    mixes, missing = _mixes(found)
    numbers = [*_numbers(old, new), *(_mix_rows(*mixes) if mixes else [])]
    if as_json:
        print_json(_document(old, new, parts, numbers, missing))
        return OK
    print_line(f"a  {entry_name(old)}", "bold")
    print_line(f"b  {entry_name(new)}", "bold")
    if parts:
        print_differences(parts, all_parts, indent="")
    else:
        print_line("the keys are equal")
    print()
    rows = [(n, _text(x), _text(y), _change(x, y)) for n, x, y in numbers if x != y]
    if rows:
        print_table(("CHANGED", "A", "B", "CHANGE"), rows, right=("A", "B", "CHANGE"))
    same = sum(x == y for _, x, y in numbers)
    print_line(f"{plural(same, 'number')} of resources and instructions equal, {len(rows)} changed")
    if missing:
        print_line(f"instruction mix: {missing}", "yellow")
    return OK


def _document(
    old: Entry, new: Entry, parts: list[Difference], numbers: list[tuple[str, Any, Any]], missing: str | None
) -> dict[str, Any]:
    return {
        "a": old.digest,
        "b": new.digest,
        "differences": [{"part": d.part, "old": d.old, "new": d.new} for d in parts],
        "numbers": [{"name": name, "a": x, "b": y} for name, x, y in numbers],
        "disassembler_missing": missing,
    }


def _mixes(found: list[Hit]) -> tuple[list[dict[str, int]] | None, str | None]:
    """Instructions by class over all GPU kernels of each library."""
    from cache_tools.machine_code import NoDisassembler, mixes, sass

    try:
        result = []
        for hit in found:
            sums: dict[str, int] = {}
            for mix in mixes(sass(hit.artifact)):
                for name, count in mix.classes.items():
                    sums[name] = sums.get(name, 0) + count
            result.append(sums)
        return result, None
    except NoDisassembler as error:
        return None, str(error)


def _numbers(old: Entry, new: Entry) -> list[tuple[str, Any, Any]]:
    """Sizes, times and, kernel by kernel in their order, resources."""
    rows: list[tuple[str, Any, Any]] = [("library bytes", old.artifact_size, new.artifact_size)]
    rows.append(("GPU kernels", len(old.resources), len(new.resources)))
    for index in range(max(len(old.resources), len(new.resources))):
        sides = [r[index] if index < len(r) else {} for r in (old.resources, new.resources)]
        which = f" of kernel {index + 1}" if max(len(old.resources), len(new.resources)) > 1 else ""
        rows += [(f"{name}{which}", sides[0].get(name), sides[1].get(name)) for name in RESOURCES]
    return rows


def _mix_rows(old: dict[str, int], new: dict[str, int]) -> list[tuple[str, Any, Any]]:
    from cache_tools.machine_code import CLASSES

    rows: list[tuple[str, Any, Any]] = [("instructions", sum(old.values()), sum(new.values()))]
    names = [name for name in CLASSES if name in old or name in new]
    return rows + [(f"instructions: {name}", old.get(name, 0), new.get(name, 0)) for name in names]


def _text(value: Any) -> str:
    return "-" if value is None else printable(value)


def _change(x: Any, y: Any) -> str:
    if type(x) is not int or type(y) is not int:
        return ""
    return f"{y - x:+d}" + (f" ({100 * (y - x) / x:+.0f} %)" if x else "")
