"""What the report page shows of a cache: collected in one pass, then drawn section by section."""

import dataclasses
from collections.abc import Iterator
from typing import Any

from cache_tools import page
from cache_tools.charts import Bar, Part, area, bars, colour_of, treemap
from cache_tools.describe import constants_text, damage_text, plural, seconds_text
from cache_tools.details import RESOURCE_HEADS
from cache_tools.page import Markup
from cache_tools.report_tables import day, resource_rows, trouble_rows
from cache_tools.report_trace import trace_section
from cache_tools.standing import DEAD, Standing, Standings
from cache_tools.summary import Summary, summarise
from cache_tools.trace import Trace
from muse_jit.console import size_text
from muse_jit.store.layout import Layout
from muse_jit.store.listing import Listed
from muse_jit.store.lookup import Miss

_CELLS = 400
"""Entries drawn one by one; in a larger cache each kernel and architecture is one cell."""
_STEPS = 48
_ROWS = 300
"""Rows of a table; a larger one would be a page that nobody can open."""


@dataclasses.dataclass(frozen=True, slots=True)
class Seen:
    """What is kept of one entry that is not damaged."""

    kernel: str
    arch: str
    digest: str
    disk: int
    seconds: float
    created: float
    resources: list[dict[str, Any]]
    words: str


@dataclasses.dataclass
class Collected:
    """What one pass over the cache left."""

    summary: Summary
    seen: list[Seen]
    damaged: list[tuple[str, str]]
    """Digest and what is wrong."""
    dead: list[tuple[Seen, Standing]]


def collect(layout: Layout, standings: Standings) -> Collected:
    """Go through the cache once."""
    seen: list[Seen] = []
    damaged: list[tuple[str, str]] = []
    dead: list[tuple[Seen, Standing]] = []

    def keep(item: Listed) -> None:
        if isinstance(item.entry, Miss):
            damaged.append((item.digest, damage_text(item.entry)))
            return
        entry = item.entry
        seconds = entry.compile_seconds + entry.link_seconds
        many = len(seen) > 10 * _CELLS  # constants and resources of so many would not be shown, only kept in memory
        words = "" if many else constants_text(entry.key["constants"])
        rows = [] if many else entry.resources
        seen.append(Seen(entry.kernel, entry.arch, item.digest, item.disk, seconds, entry.created, rows, words))
        standing = standings.of(entry)
        if standing in DEAD:
            dead.append((seen[-1], standing))

    return Collected(summarise(layout, standings, also=keep), seen, damaged, dead)


def report_page(layout: Layout, found: Collected, trace: Trace | None, now: float) -> str:
    """The page, as one HTML document."""
    sections = [_tiles(found.summary), _bytes(found), _compile(found), _over_time(found, now), _use(found.summary)]
    sections += [_resources(found), _trouble(found)]
    if trace is not None:
        sections.append(trace_section(trace))
    made = day(now, time=True)
    return page.document("muse_jit cache", f"{layout.root}, as it was on {made} UTC", sections)


def _tiles(summary: Summary) -> str:
    total, damaged = summary.total, sum(summary.damaged.values())
    return page.tiles(
        [
            (f"{total.entries:,}", "kernels" if total.entries != 1 else "kernel", ""),
            (size_text(summary.disk), "on disk in all", ""),
            (seconds_text(total.compile_seconds), "of compiling spared by a full hit", ""),
            (f"{total.used:,}", "used after the day they were made", ""),
            (f"{total.dead:,}", "dead here (stale)", "warn" if total.dead else ""),
            (f"{damaged:,}", "damaged", "bad" if damaged else ""),
        ]
    )


def _kernels(found: Collected) -> dict[str, str]:
    """Kernel to the class of its colour, the one with most bytes first; the same in every picture."""
    order = sorted(found.summary.kernels, key=lambda k: (-found.summary.kernels[k].disk, k))
    return {kernel: colour_of(i) for i, kernel in enumerate(order)}


def _bytes(found: Collected) -> str:
    colours = _kernels(found)
    groups: dict[str, list[Part]] = {kernel: [] for kernel in colours}
    if len(found.seen) <= _CELLS:
        for s in sorted(found.seen, key=lambda s: -s.disk):
            tip = f"{s.kernel} {s.arch}\n{s.digest[:12]}, {size_text(s.disk)}\n{s.words}"
            label = s.arch if groups[s.kernel] else s.kernel  # the largest cell of a kernel says its name
            groups[s.kernel].append(Part(s.disk, colours[s.kernel], label, tip))
    else:
        for kernel, arch, disk, _, count in _by_kernel_and_arch(found):
            tip = f"{kernel} {arch}\n{plural(count, 'entry', 'entries')}, {size_text(disk)}"
            groups[kernel].append(Part(disk, colours[kernel], f"{kernel} {arch}", tip))
    summary = found.summary
    rows: list[tuple[Any, ...]] = [
        (kernel, arch, f"{count:,}", f"{disk:,}", size_text(disk))
        for kernel, arch, disk, _, count in _by_kernel_and_arch(found)
    ]
    beside = [("damaged entries", summary.damaged_disk), ("set aside", summary.outside["set_aside"])]
    beside += [("staging", summary.outside["staging"]), ("locks and folders", summary.outside["folders"])]
    rows += [(f"({name})", "", "", f"{size:,}", size_text(size)) for name, size in beside]
    rows.append(("all", "", f"{summary.total.entries:,}", f"{summary.disk:,}", size_text(summary.disk)))
    head = ("kernel", "architecture", "entries", "bytes on disk", "size")
    picture = treemap(list(groups.items()), "bytes on disk by kernel and architecture") if found.seen else _nothing()
    shown = page.figure(
        "bytes", picture, page.table(head, rows, head[2:]), page.legend([(c, k) for k, c in colours.items()])
    )
    says = f"Every cell is an entry, as large as its bytes on disk: {size_text(summary.total.disk)} together."
    if len(found.seen) > _CELLS:
        says = f"Every cell is a kernel on an architecture: {size_text(summary.total.disk)} on disk together."
    return page.section("bytes", "Where the bytes are", says, shown)


def _by_kernel_and_arch(found: Collected) -> Iterator[tuple[str, str, int, float, int]]:
    """Kernel, architecture, bytes, seconds and count, the most bytes first."""
    sums: dict[tuple[str, str], list[float]] = {}
    for s in found.seen:
        row = sums.setdefault((s.kernel, s.arch), [0, 0.0, 0])
        row[0] += s.disk
        row[1] += s.seconds
        row[2] += 1
    for (kernel, arch), (disk, seconds, count) in sorted(sums.items(), key=lambda pair: (-pair[1][0], pair[0])):
        yield kernel, arch, int(disk), seconds, int(count)


def _compile(found: Collected) -> str:
    arches = sorted(found.summary.arches)
    colours = {arch: colour_of(i) for i, arch in enumerate(arches)}
    sums = list(_by_kernel_and_arch(found))
    rows = []
    for kernel, group in sorted(found.summary.kernels.items(), key=lambda pair: (-pair[1].compile_seconds, pair[0])):
        parts = tuple(
            Part(
                seconds,
                colours[arch],
                arch,
                f"{kernel} {arch}\n{seconds_text(seconds)} for {plural(count, 'entry', 'entries')}",
            )
            for k, arch, _, seconds, count in sorted(sums, key=lambda s: s[1])
            if k == kernel
        )
        rows.append(Bar(kernel, seconds_text(group.compile_seconds), parts))
    table = [
        (kernel, arch, f"{count:,}", f"{seconds:.2f}", f"{seconds / count:.3f}")
        for kernel, arch, _, seconds, count in sums
    ]
    head = ("kernel", "architecture", "entries", "seconds", "seconds each")
    chart = bars(rows[:20], "compile seconds by kernel") if rows else _nothing()
    body = page.figure(
        "compile", chart, page.table(head, table, head[2:]), page.legend([(c, a) for a, c in colours.items()])
    )
    says = "What compiling and linking took: what a process that finds all of them is spared."
    return page.section("compile", "Compile seconds by kernel", says, body)


def _over_time(found: Collected, now: float) -> str:
    """How many there are of what was made until then; what was deleted since is not known."""
    colours = _kernels(found)
    if not found.seen:
        return page.section(
            "time", "Entries over time", "When the entries were made.", page.figure("time", _nothing(), "")
        )
    first = min(s.created for s in found.seen)
    last = max(now, max(s.created for s in found.seen))
    step = max((last - first) / _STEPS, 1.0)
    ends = [first + step * (i + 1) for i in range(_STEPS)]
    counts = {kernel: [0] * _STEPS for kernel in colours}
    for s in found.seen:
        counts[s.kernel][min(int((s.created - first) / step), _STEPS - 1)] += 1
    series, running = [], {kernel: 0 for kernel in colours}
    for kernel, colour in colours.items():
        values: list[float] = []
        for count in counts[kernel]:
            running[kernel] += count
            values.append(running[kernel])
        series.append((colour, kernel, values))
    short = last - first < 3 * 86400
    tips = [
        "\n".join(
            [f"until {day(ends[i], time=short)}", *(f"{kernel}: {values[i]:,.0f}" for _, kernel, values in series)]
        )
        for i in range(_STEPS)
    ]
    edges = [day(t, time=short) for t in (first, (first + last) / 2, last)]
    shown = [i for i in range(_STEPS) if i in (0, _STEPS - 1) or any(counts[k][i] for k in counts)]
    rows = []
    for i in shown:
        values_then = [values[i] for _, _, values in series]
        rows.append((day(ends[i], time=short), *(f"{v:,.0f}" for v in values_then), f"{sum(values_then):,.0f}"))
    head = ("until (UTC)", *(kernel for _, kernel, _ in series), "all")
    chart = area(edges, series, tips, "entries over time")
    body = page.figure("time", chart, page.table(head, rows, head[1:]), page.legend([(c, k) for c, k, _ in series]))
    says = "Entries that are there now, by when they were made."
    return page.section("time", "Entries over time", says, body)


def _use(summary: Summary) -> str:
    total, damaged = summary.total, sum(summary.damaged.values())
    parts = [
        ("c1", "used after the day they were made", total.used),
        ("rest", "no later use recorded", total.entries - total.used),
    ]
    stale = [("c3", "can be found here", total.entries - total.dead), ("c4", "dead here (stale)", total.dead)]
    stale.append(("badfill", "damaged", damaged))
    rows = []
    for name, values in (("used", parts), ("usable", stale)):
        shown = tuple(Part(n, colour, words, f"{words}: {n:,}") for colour, words, n in values if n)
        rows.append(Bar(name, plural(sum(n for _, _, n in values), "entry", "entries"), shown))
    table = page.table(("entries", "how many"), [(words, f"{n:,}") for _, words, n in parts + stale], ("how many",))
    legend = page.legend([(colour, words) for colour, words, n in parts + stale if n])
    says = "A use moves an entry's stamp at most once a day, so uses are seen, not counted."
    return page.section("use", "Is it used, and can it be", says, page.figure("use", bars(rows, "use"), table, legend))


def _resources(found: Collected) -> str:
    rows = resource_rows([(s.kernel, s.arch, s.digest, s.resources) for s in found.seen[:_ROWS]])
    head = ("kernel", "architecture", "entry", *(h.lower() for h in RESOURCE_HEADS))
    says = "Of each GPU kernel: registers a thread (255 at most), memory in bytes. Red marks a stack or spills."
    if len(found.seen) > _ROWS:
        says += f" The first {_ROWS} of {len(found.seen):,} entries; muse-cache show has the others."
    table = page.table(head, rows, head[3:])
    return page.section("resources", "Resources of the kernels", says, f'<div data-chart="resources">{table}</div>')


def _trouble(found: Collected) -> str:
    if not found.damaged and not found.dead:
        says = "None: every manifest can be read, and every entry can be found with what is installed here."
        return page.section("trouble", "Damaged and stale entries", says, "")
    says = (
        "Damaged entries are never loaded and are compiled again when asked for. Stale ones were made by another "
        "toolchain or source than is installed here; another machine that shares the folder may still use them."
    )
    head = ("entry", "kernel", "what", "remedy")
    dead = [(s.digest, f"{s.kernel} {s.arch}", standing) for s, standing in found.dead]
    table = page.table(head, trouble_rows(found.damaged, dead, _ROWS), wide=("what", "remedy"))
    return page.section("trouble", "Damaged and stale entries", says, f'<div data-chart="trouble">{table}</div>')


def _nothing() -> Markup:
    return Markup('<p class="quiet">There are no entries to draw.</p>')
