"""What a warm-up shows a person: a progress bar on a terminal, a plain line per kernel elsewhere, a summary."""

import contextlib
import sys
from collections.abc import Callable, Iterator

from muse_jit.warmup import Outcome, WarmupReport


@contextlib.contextmanager
def watch(total: int, *, quiet: bool) -> Iterator[Callable[[Outcome], None]]:
    """Yields the function to call with each outcome. `quiet` shows nothing."""
    if quiet:
        yield lambda outcome: None
    elif sys.stdout.isatty():
        from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

        columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
        with Progress(*columns) as progress:
            task = progress.add_task("kernels", total=total)

            def advance(outcome: Outcome) -> None:
                progress.console.print(_line(outcome), markup=False, highlight=False, soft_wrap=True)
                progress.advance(task)

            yield advance
    else:
        yield lambda outcome: print(_line(outcome), flush=True)


def show_report(report: WarmupReport) -> None:
    """The summary after the last kernel."""
    counts = [f"{report.count(status)} {status}" for status in ("hit", "compiled", "planned", "failed")]
    shown = [c for c in counts if not c.startswith("0 ")] or ["nothing to do"]
    print(f"{len(report.outcomes)} kernels: {', '.join(shown)} in {report.seconds:.2f} s; cache {report.cache_dir}")
    if report.not_stored:
        print(f"{report.not_stored} of them could not be stored")
    for family, reason in report.unavailable:
        print(f"not planned: {family} ({reason})")


def _line(outcome: Outcome) -> str:
    time = f"{outcome.compile_s:6.2f} s" if outcome.compile_s is not None else " " * 8
    error = f"  {outcome.error}" if outcome.error else ""
    return f"{outcome.status:9} {time}  {outcome.arch:8} {outcome.digest[:12] or '-':12}  {outcome.kernel}{error}"
