"""The start-up trace in the report: a timeline, a lane for each thread of each process."""

from cache_tools import page
from cache_tools.charts import Lane, Part, timeline
from cache_tools.describe import seconds_text
from cache_tools.trace import STAGES, Span, Trace

_COLOURS = {
    "look-up": "c3",
    "wait": "rest",
    "import": "c7",
    "compile": "c1",
    "link": "c2",
    "publish": "c4",
    "load": "c5",
}
_DRAWN = 3000
"""Spans drawn, the longest ones."""
_LISTED = 200


def trace_section(trace: Trace) -> str:
    """The section of a start-up trace."""
    drawn = sorted(sorted(trace.spans, key=lambda s: -s.seconds)[:_DRAWN], key=lambda s: s.start)
    lanes = [
        Lane(name, tuple((s.start, s.seconds, _part(s)) for s in drawn if (s.pid, s.tid) == lane))
        for lane, name in trace.lanes.items()
    ]
    end = trace.seconds or 1e-6
    axis = [_time(end * i / 4) for i in range(5)]
    stages = [s for s in STAGES if any(t.stage == s for t in trace.spans)]
    others = sorted({t.stage for t in trace.spans} - set(STAGES))
    names = [(_COLOURS[s], s) for s in stages] + ([("c8", "other")] if others else [])
    rows = [(s, *_sums([t for t in trace.spans if t.stage == s])) for s in stages + others]
    head = ("stage", "times", "seconds", "longest", "from", "until")
    longest = sorted(trace.spans, key=lambda s: -s.seconds)[:_LISTED]
    events = [
        (
            s.stage,
            s.kernel or "-",
            s.arch or "-",
            s.digest[:12] or "-",
            trace.lanes[s.pid, s.tid],
            _time(s.start),
            _time(s.seconds),
        )
        for s in longest
    ]
    event_head = ("stage", "kernel", "architecture", "entry", "where", "at", "took")
    numbers = page.table(head, rows, head[1:]) + page.table(event_head, events, event_head[5:])
    says = f"{_time(trace.seconds)} from first to last, in {len(lanes)} {'lane' if len(lanes) == 1 else 'lanes'}."
    if len(trace.spans) > _DRAWN:
        says += f" Drawn are the {_DRAWN:,} longest of {len(trace.spans):,} stages."
    body = page.figure("trace", timeline(lanes, end, axis, "start-up"), numbers, page.legend(names))
    return page.section("trace", "Start-up", says, body)


def _part(span: Span) -> Part:
    what = " ".join(part for part in (span.kernel, span.arch, span.digest[:12]) if part)
    tip = f"{span.stage} {what}\n{_time(span.seconds)}, from {_time(span.start)}"
    return Part(span.seconds, _COLOURS.get(span.stage, "c8"), f"{span.stage} {span.kernel}".strip(), tip)


def _sums(spans: list[Span]) -> tuple[str, ...]:
    until = max(s.start + s.seconds for s in spans)
    total, longest = sum(s.seconds for s in spans), max(s.seconds for s in spans)
    return (f"{len(spans):,}", f"{total:.3f}", _time(longest), _time(min(s.start for s in spans)), _time(until))


def _time(seconds: float) -> str:
    return f"{seconds * 1e3:.1f} ms" if seconds < 1 else seconds_text(seconds)
