"""A report as a trace for Perfetto or chrome://tracing: a row for each thread of each process, a bar for each stage.

The format is the Chrome trace event format: complete events ("ph": "X") with times in microseconds.
"""

import json
import os
from typing import Any

from muse_jit.errors import UsageError
from muse_jit.report import Report

_ROLES = {"import": "compile server", "compile": "compile worker", "link": "compile worker"}


def trace_events(report: Report) -> dict[str, Any]:
    """The trace document of a report. Time 0 is the first span's start."""
    spans = [(kernel, span) for kernel in report.kernels for span in kernel.spans]
    origin = min((span.start for _, span in spans), default=0.0)
    events: list[dict[str, Any]] = []
    names: dict[int, str] = {}
    for kernel, span in spans:
        names.setdefault(span.pid, f"{_ROLES.get(span.stage, 'muse-jit')} {span.pid}")
        events.append(
            {
                "name": span.stage,
                "cat": "muse_jit",
                "ph": "X",
                "ts": round((span.start - origin) * 1e6, 1),
                "dur": round(span.seconds * 1e6, 1),
                "pid": span.pid,
                "tid": span.thread,
                "args": {"kernel": kernel.kernel, "digest": kernel.digest, "arch": kernel.arch},
            }
        )
    events.sort(key=lambda event: event["ts"])
    processes = [
        {"name": "process_name", "ph": "M", "pid": pid, "tid": pid, "args": {"name": name}}
        for pid, name in sorted(names.items())
    ]
    return {
        "traceEvents": processes + events,
        "displayTimeUnit": "ms",
        "otherData": {"cache_dir": report.cache_dir, "seconds": report.seconds},
    }


def check_writable(path: str) -> None:
    """Find out before the work whether the trace can be written after it.

    Raises:
        UsageError: it cannot.
    """
    folder = os.path.dirname(os.path.abspath(path))
    if os.path.isdir(path) or not os.path.isdir(folder) or not os.access(folder, os.W_OK):
        raise UsageError(f"the trace cannot be written to {os.path.abspath(path)}: there must be a writable folder")


def write_trace(report: Report, path: str) -> None:
    """Write the trace of a report to a file.

    Raises:
        UsageError: the file cannot be written.
    """
    try:
        with open(path, "w", encoding="utf-8") as file:
            json.dump(trace_events(report), file, indent=1)
            file.write("\n")
    except OSError as error:
        raise UsageError(f"the trace cannot be written to {os.path.abspath(path)}: {error.strerror}") from None
