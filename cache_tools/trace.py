"""Read a start-up trace: Chrome's trace event format, as `muse-jit warmup --trace FILE` writes it.

{"traceEvents": [{"name": STAGE, "cat": "muse_jit", "ph": "X", "ts": us, "dur": us, "pid": .., "tid": ..,
                  "args": {"kernel": .., "digest": .., "arch": ..}},
                 {"name": "process_name" | "thread_name", "ph": "M", "pid": .., "tid": .., "args": {"name": ..}}],
 "otherData": {..}}
"""

import dataclasses
import json
import math
from typing import Any

from muse_jit.errors import UsageError

STAGES = ("look-up", "wait", "import", "compile", "link", "publish", "load")
"""The stages of a start-up, in the order of the path."""

_BYTES = 256 << 20


@dataclasses.dataclass(frozen=True)
class Span:
    """One stage of one kernel, in one thread."""

    stage: str
    start: float
    """Seconds since the first span of the trace began."""
    seconds: float
    pid: int
    tid: int
    kernel: str
    digest: str
    arch: str


@dataclasses.dataclass(frozen=True)
class Trace:
    """A start-up: its spans by start, and what processes and threads are called."""

    spans: tuple[Span, ...]
    lanes: dict[tuple[int, int], str]
    """Process and thread id to a name, by process id: the ranks of one start have them in their order."""

    @property
    def seconds(self) -> float:
        """From the first beginning to the last end."""
        return max((s.start + s.seconds for s in self.spans), default=0.0)


def read_trace(path: str) -> Trace:
    """Read a trace file.

    Raises:
        UsageError: it cannot be read or is not a trace; one line says what and where.
    """
    try:
        with open(path, encoding="utf-8") as file:
            text = file.read(_BYTES + 1)
    except (OSError, ValueError) as error:
        reason = error.strerror if isinstance(error, OSError) else "it is not UTF-8 text"
        raise UsageError(f"trace {path}: {reason}") from None
    if len(text) > _BYTES:
        raise UsageError(f"trace {path}: more than {_BYTES >> 20} MiB")
    try:
        document = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise UsageError(f"trace {path} is not JSON: {error}") from None
    events = document.get("traceEvents") if isinstance(document, dict) else None
    if not isinstance(events, list):
        raise UsageError(f"trace {path} has no list traceEvents (write one with: muse-jit warmup --trace FILE)")
    return _read_events(path, events)


def _read_events(path: str, events: list[Any]) -> Trace:
    spans, names = [], {}
    for number, event in enumerate(events):
        where = f"trace {path}, event {number}"
        if not isinstance(event, dict):
            raise UsageError(f"{where}: not an object")
        pid, tid = _integer(where, event, "pid"), _integer(where, event, "tid")
        arguments = event.get("args", {})
        if not isinstance(arguments, dict):
            raise UsageError(f"{where}: args is not an object")
        if event.get("ph") == "M":
            names[event.get("name"), pid, tid] = str(arguments.get("name", ""))
        elif event.get("ph") == "X":
            if not isinstance(event.get("name"), str):
                raise UsageError(f"{where}: name is not a text")
            kernel, digest, arch = (str(arguments.get(n, "")) for n in ("kernel", "digest", "arch"))
            start, seconds = _number(where, event, "ts") / 1e6, _number(where, event, "dur") / 1e6
            if seconds < 0:
                raise UsageError(f"{where}: dur is negative")
            spans.append(Span(event["name"], start, seconds, pid, tid, kernel, digest, arch))
        else:
            raise UsageError(f"{where}: ph is {event.get('ph')!r}; a start-up trace has X and M only")
    if not spans:
        raise UsageError(f"trace {path} has no events of any duration")
    first = min(s.start for s in spans)
    shifted = sorted((dataclasses.replace(s, start=s.start - first) for s in spans), key=lambda s: (s.start, s.pid))
    lanes = {(s.pid, s.tid): _lane_name(names, s.pid, s.tid) for s in sorted(shifted, key=_lane)}
    return Trace(tuple(shifted), lanes)


def _lane(span: Span) -> tuple[int, int]:
    return span.pid, span.tid


def _lane_name(names: dict[tuple[Any, int, int], str], pid: int, tid: int) -> str:
    process = next((n for (kind, p, _), n in names.items() if kind == "process_name" and p == pid), "")
    thread = names.get(("thread_name", pid, tid), "")
    name = process or f"process {pid}"
    return f"{name}, {thread}" if thread else name if tid == pid else f"{name}, thread {tid}"


def _number(where: str, event: dict[str, Any], name: str) -> float:
    value: Any = event.get(name)
    if type(value) not in (int, float) or not math.isfinite(value):
        raise UsageError(f"{where}: {name} is {value!r}, not a number")
    return float(value)


def _integer(where: str, event: dict[str, Any], name: str) -> int:
    value = event.get(name)
    if type(value) is not int:
        raise UsageError(f"{where}: {name} is {value!r}, not a whole number")
    return value
