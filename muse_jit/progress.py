"""What a warm-up shows a person: a progress bar on a terminal, a plain line per kernel elsewhere, a summary."""

import contextlib
import sys
import threading
from collections.abc import Callable, Iterator

from muse_jit.report import KernelReport, Report
from muse_jit.wanted import Wanted

_SHOWN = 3
"""Kernels under way that the bar names; there may be as many as there are CPUs."""


@contextlib.contextmanager
def watch(total: int, *, quiet: bool) -> Iterator[Callable[[Wanted], None]]:
    """Yields the function to call whenever a kernel begins or ends. `quiet` shows nothing."""
    if quiet:
        yield lambda item: None
    elif sys.stdout.isatty():
        with _bar(total) as on_change:
            yield on_change
    else:
        state = threading.Lock()

        def print_line(item: Wanted) -> None:
            if not item.under_way:
                with state:
                    print(line(item.report()), flush=True)

        yield print_line


@contextlib.contextmanager
def _bar(total: int) -> Iterator[Callable[[Wanted], None]]:
    from rich import progress as bars

    columns = (
        bars.BarColumn(bar_width=24),
        bars.MofNCompleteColumn(),
        bars.TimeElapsedColumn(),
        bars.TextColumn("left"),
        bars.TimeRemainingColumn(),
        bars.TextColumn("{task.description}", markup=False),
    )
    under_way: dict[int, str] = {}
    state = threading.Lock()
    with bars.Progress(*columns) as progress:
        task = progress.add_task("looking up", total=total)

        def on_change(item: Wanted) -> None:
            with state:
                if item.under_way:
                    under_way[id(item)] = f"{item.constants.family} {item.service.target.arch}"
                else:
                    under_way.pop(id(item), None)
                    progress.console.print(line(item.report()), markup=False, highlight=False, soft_wrap=True)
                    progress.advance(task)
                names = list(under_way.values())
                rest = f" and {len(names) - _SHOWN} more" if len(names) > _SHOWN else ""
                progress.update(task, description=", ".join(names[:_SHOWN]) + rest)

        yield on_change


def show_report(report: Report) -> None:
    """The summary after the last kernel: a row for each family and architecture, and the sum."""
    groups: dict[tuple[str, str], list[KernelReport]] = {}
    for kernel in report.kernels:
        groups.setdefault((kernel.kernel, kernel.arch), []).append(kernel)
    statuses = [s for s in ("hit", "compiled", "planned", "failed") if report.count(s)]
    rows = [("KERNEL", "ARCH", *(s.upper() for s in statuses), "COMPILE")]
    for (family, arch), kernels in groups.items():
        counts = [str(sum(k.status == status for k in kernels)) for status in statuses]
        rows.append((family, arch, *counts, f"{sum(k.compile_s or 0.0 for k in kernels):.2f} s"))
    if len(rows) > 1:
        widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
        print()
        for row in rows:
            cells = [c.ljust(w) if i < 2 else c.rjust(w) for i, (c, w) in enumerate(zip(row, widths, strict=True))]
            print("  ".join(cells).rstrip())
    counts = [f"{report.count(status)} {status}" for status in statuses] or ["nothing to do"]
    print(f"{len(report.kernels)} kernels: {', '.join(counts)} in {report.seconds:.2f} s; cache {report.cache_dir}")
    if report.not_stored:
        print(f"{report.not_stored} of them could not be stored")
    for family, reason in report.unavailable:
        print(f"not planned: {family} ({reason})")


def line(kernel: KernelReport) -> str:
    """One kernel: status, compile time, architecture, digest, family, and why it is missing or failed."""
    time = f"{kernel.compile_s:6.2f} s" if kernel.compile_s is not None else " " * 8
    why = ""
    if kernel.error:
        why = f"  {kernel.error}"
    elif kernel.status == "planned":
        why = f"  {kernel.reason}" + (f": {kernel.detail}" if kernel.detail else "")
    return f"{kernel.status:9} {time}  {kernel.arch:8} {kernel.digest[:12] or '-':12}  {kernel.kernel}{why}"
