"""Sums over a whole cache, in one pass that keeps nothing but the sums."""

import dataclasses
import gc
from collections.abc import Callable
from typing import Any

from cache_tools.describe import was_used
from cache_tools.shares import FIRST, SHARDS, in_shares, processes_for
from cache_tools.standing import DEAD, Standings
from muse_jit.store.entry import Entry
from muse_jit.store.layout import Layout
from muse_jit.store.listing import Listed, listed, outside
from muse_jit.store.lookup import Miss


@dataclasses.dataclass
class Group:
    """What some entries come to."""

    entries: int = 0
    disk: int = 0
    """Bytes on disk, as `du` counts them."""
    compile_seconds: float = 0.0
    """What it took to compile and link them: what whoever finds all of them is spared."""
    used: int = 0
    """How many have a recorded use after the day they were made."""
    dead: int = 0
    """How many cannot be found with the toolchain and source installed here."""

    def add(self, item: Listed) -> None:
        """Take in one entry that is not damaged."""
        assert not isinstance(item.entry, Miss)
        self.entries += 1
        self.disk += item.disk
        self.compile_seconds += item.entry.compile_seconds + item.entry.link_seconds
        self.used += bool(was_used(item))

    def merge(self, part: dict[str, Any]) -> None:
        """Add another group's sums."""
        for field in dataclasses.fields(self):
            setattr(self, field.name, getattr(self, field.name) + part[field.name])

    def as_dict(self) -> dict[str, Any]:
        """The fields in JSON."""
        return {
            "entries": self.entries,
            "disk": self.disk,
            "compile_s": round(self.compile_seconds, 4),
            "used": self.used,
            "dead": self.dead,
        }


@dataclasses.dataclass
class Summary:
    """The sums; damaged entries are in none of the groups."""

    total: Group = dataclasses.field(default_factory=Group)
    kernels: dict[str, Group] = dataclasses.field(default_factory=dict)
    arches: dict[str, Group] = dataclasses.field(default_factory=dict)
    toolchains: dict[str, Group] = dataclasses.field(default_factory=dict)
    toolchain_parts: dict[str, dict[str, Any]] = dataclasses.field(default_factory=dict)
    """Toolchain digest to its key parts, target's CUDA major and host."""
    standings: dict[str, int] = dataclasses.field(default_factory=dict)
    damaged: dict[str, int] = dataclasses.field(default_factory=dict)
    """Reason to how many."""
    damaged_disk: int = 0
    outside: dict[str, int] = dataclasses.field(default_factory=dict)
    """Bytes on disk beside the entries: "set_aside", "staging", and "folders" (locks, folders, small files)."""
    set_aside: int = 0
    """Folders of damaged entries and logs that are kept to look at."""

    def merge(self, part: dict[str, Any]) -> None:
        """Add the sums of another part of the cache, as `dataclasses.asdict` gives them."""
        self.total.merge(part["total"])
        for mine, theirs in ((self.kernels, "kernels"), (self.arches, "arches"), (self.toolchains, "toolchains")):
            for name, group in part[theirs].items():
                mine.setdefault(name, Group()).merge(group)
        for counts, theirs in ((self.standings, "standings"), (self.damaged, "damaged")):
            for name, count in part[theirs].items():
                counts[name] = counts.get(name, 0) + count
        self.damaged_disk += part["damaged_disk"]
        self.toolchain_parts |= part["toolchain_parts"]

    @property
    def disk(self) -> int:
        """Bytes on disk of the whole cache folder, as `du -s` counts them."""
        return self.total.disk + self.damaged_disk + sum(self.outside.values())


def summarise(layout: Layout, standings: Standings, also: Callable[[Listed], None] | None = None) -> Summary:
    """Go through a cache once. `also` sees each entry that is passed, damaged ones included."""
    result = Summary()
    # Millions of objects come and go, none in a cycle; looking for cycles among them would take a tenth of the time.
    was_on = gc.isenabled()
    gc.disable()
    try:
        _add(result, layout, standings, SHARDS[:FIRST], also)
        processes = 1 if also is not None else processes_for(layout)
        if processes == 1:
            _add(result, layout, standings, SHARDS[FIRST:], also)
        else:
            for part in in_shares(SHARDS[FIRST:], processes, lambda shards: _share(layout, standings, shards)):
                result.merge(part)
    finally:
        if was_on:
            gc.enable()
    result.outside, result.set_aside = outside(layout)
    return result


def _share(layout: Layout, standings: Standings, shards: tuple[str, ...]) -> dict[str, Any]:
    part = Summary()
    _add(part, layout, standings, shards, None)
    return dataclasses.asdict(part)


def _add(
    result: Summary,
    layout: Layout,
    standings: Standings,
    shards: tuple[str, ...],
    also: Callable[[Listed], None] | None,
) -> None:
    # Entries of one kernel, target, toolchain and source stand alike: what is asked of them is asked once, and an
    # entry costs one look-up and a few additions.
    cells: dict[Any, tuple[Entry, Group]] = {}
    for item in (item for shard in shards for item in listed(layout, shard)):
        if also is not None:
            also(item)
        entry = item.entry
        if isinstance(entry, Miss):
            result.damaged[entry.reason] = result.damaged.get(entry.reason, 0) + 1
            result.damaged_disk += item.disk
            continue
        alike = _alike(entry.key)
        try:
            cell = cells.get(alike)
        except TypeError:  # a part of a foreign key that cannot be hashed
            alike = repr(alike)
            cell = cells.get(alike)
        if cell is None:
            cell = cells[alike] = entry, Group()
        cell[1].add(item)
    for entry, group in cells.values():
        _fold(result, entry, group, standings)


_ALIKE = ("kernel", "source", "build", "schema", "recipe")


def _alike(key: dict[str, Any]) -> Any:
    """The parts of a key by which entries stand alike, to compare: texts in tuples, where the key is one of ours."""
    parts = tuple([(n, tuple(p.items()) if type(p) is dict else p) for n, p in key["toolchain"].items()])
    return (*[key.get(name) for name in _ALIKE], tuple(key["target"].items()), parts)


def _fold(result: Summary, entry: Entry, group: Group, standings: Standings) -> None:
    """Add the sums of entries that stand alike; `entry` is one of them."""
    standing, toolchain = standings.of(entry), standings.toolchain_digest(entry)
    result.standings[standing] = result.standings.get(standing, 0) + group.entries
    if toolchain not in result.toolchain_parts:
        target = entry.key["target"]
        result.toolchain_parts[toolchain] = {
            "parts": entry.key["toolchain"],
            "cuda": target.get("cuda"),
            "host": target.get("host"),
            "installed": standings.installed(target.get("cuda"), target.get("host")) == toolchain,
        }
    group.dead = group.entries if standing in DEAD else 0
    sums = dataclasses.asdict(group)
    result.total.merge(sums)
    result.kernels.setdefault(entry.kernel, Group()).merge(sums)
    result.arches.setdefault(entry.arch, Group()).merge(sums)
    result.toolchains.setdefault(toolchain, Group()).merge(sums)
