import json

import pytest
from support.traces import name, ranks, span, write

from cache_tools.trace import read_trace
from muse_jit.errors import UsageError


def test_spans_and_lanes(tmp_path):
    events = [
        name("process_name", 10, "rank 0"),
        name("thread_name", 10, "main"),
        span("compile", 3.5, 1.0),
        span("look-up", 3.0, 0.25),
        span("load", 5.0, 0.5, pid=11, tid=11, kernel="dual_norm"),
        span("load", 5.0, 0.5, pid=11, tid=12),
    ]
    trace = read_trace(write(tmp_path / "t.json", {"traceEvents": events}))
    assert [(s.stage, s.start, s.seconds) for s in trace.spans[:2]] == [("look-up", 0.0, 0.25), ("compile", 0.5, 1.0)]
    assert trace.spans[2].kernel == "dual_norm"
    assert trace.seconds == 2.5
    assert trace.lanes == {(10, 10): "rank 0, main", (11, 11): "process 11", (11, 12): "process 11, thread 12"}


def test_a_whole_start_up(tmp_path):
    trace = read_trace(write(tmp_path / "t.json", ranks(4)))
    assert list(trace.lanes.values()) == [f"rank {n}" for n in range(4)]
    assert {s.stage for s in trace.spans} == {"look-up", "import", "compile", "link", "publish", "wait", "load"}


GOOD = span("compile", 1, 1)


@pytest.mark.parametrize(
    ("document", "words"),
    [
        ([GOOD], "no list traceEvents"),
        ({}, "no list traceEvents"),
        ({"traceEvents": {}}, "no list traceEvents"),
        ({"traceEvents": []}, "no events of any duration"),
        ({"traceEvents": [name("process_name", 1, "x")]}, "no events of any duration"),
        ({"traceEvents": [GOOD, 7]}, "event 1: not an object"),
        ({"traceEvents": [{**GOOD, "ph": "B"}]}, "event 0: ph is 'B'"),
        ({"traceEvents": [{**GOOD, "ts": "1"}]}, "event 0: ts is '1', not a number"),
        ({"traceEvents": [{**GOOD, "ts": True}]}, "event 0: ts is True, not a number"),
        ({"traceEvents": [{**GOOD, "dur": -1}]}, "event 0: dur is negative"),
        ({"traceEvents": [{**GOOD, "dur": None}]}, "event 0: dur is None, not a number"),
        ({"traceEvents": [{**GOOD, "dur": float("nan")}]}, "event 0: dur is nan, not a number"),
        ({"traceEvents": [{**GOOD, "pid": "1"}]}, "event 0: pid is '1', not a whole number"),
        ({"traceEvents": [{**GOOD, "name": 1}]}, "event 0: name is not a text"),
        ({"traceEvents": [{**GOOD, "args": []}]}, "event 0: args is not an object"),
    ],
)
def test_what_is_no_trace_is_one_line_that_says_where(tmp_path, document, words):
    path = write(tmp_path / "t.json", document)
    with pytest.raises(UsageError) as error:
        read_trace(str(path))
    assert words in str(error.value)
    assert str(path) in str(error.value)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize("content", [b"", b"{", b"\xff\xfe", b"[" * 100_000, json.dumps(ranks()).encode()[:-1]])
def test_what_is_no_json_is_one_line(tmp_path, content):
    (tmp_path / "t.json").write_bytes(content)
    with pytest.raises(UsageError, match=r"trace .*t\.json"):
        read_trace(str(tmp_path / "t.json"))
    with pytest.raises(UsageError, match="No such file"):
        read_trace(str(tmp_path / "absent.json"))
