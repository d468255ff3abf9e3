"""The trace of a warm-up: spans of all processes on one clock, in the format that trace viewers read."""

import json
import os

import pytest
from support import toy
from support.process import command

from muse_jit.errors import UsageError
from muse_jit.report import KernelReport, Report
from muse_jit.service import JitService
from muse_jit.spans import Span
from muse_jit.trace import check_writable, trace_events


def _plan(tmp_path, values, **more):
    count = str(tmp_path / "count")
    sets = [toy.ToyConstants(value=v, count_file=count, **more) for v in values]
    kernels = [{"kernel": "toy", "arch": "sm_90a", "constants": c.as_dict()} for c in sets]
    return json.dumps({"schema": 1, "kernels": kernels}), sets


def test_spans_become_bars_in_microseconds_from_the_first():
    spans = (
        Span("look-up", 100.0, 0.001, 7, 8),
        Span("import", 100.25, 0.5, 20, 20),
        Span("compile", 101.0, 2, 21, 21),
    )
    kernel = KernelReport("d" * 64, "toy", "sm_90a", "compiled", spans=spans)
    document = trace_events(Report((kernel,), 3.0, "/cache"))
    names = {e["pid"]: e["args"]["name"] for e in document["traceEvents"] if e["ph"] == "M"}
    assert names == {7: "muse-jit 7", 20: "compile server 20", 21: "compile worker 21"}
    bars = [e for e in document["traceEvents"] if e["ph"] == "X"]
    assert [(b["name"], b["ts"], b["dur"], b["pid"], b["tid"]) for b in bars] == [
        ("look-up", 0.0, 1000.0, 7, 8),
        ("import", 250000.0, 500000.0, 20, 20),
        ("compile", 1000000.0, 2000000.0, 21, 21),
    ]
    assert bars[0]["args"] == {"kernel": "toy", "digest": "d" * 64, "arch": "sm_90a"}


@pytest.mark.processes
def test_a_warmup_writes_its_trace(tmp_path):
    text, _ = _plan(tmp_path, [1, 2, 3], seconds=0.2)
    trace = tmp_path / "trace.json"
    arguments = ("--plan", text, "--cache-dir", tmp_path / "cache", "--trace", trace, "--jobs", 2, "--json")
    code, out, err = command("muse-jit", "warmup", *arguments, before="from support import toy")
    assert code == 0, err
    report = json.loads(out)
    bars = [e for e in json.loads(trace.read_text())["traceEvents"] if e["ph"] == "X"]
    by_stage = {}
    for bar in bars:
        by_stage.setdefault(bar["name"], []).append(bar)
        assert bar["ts"] >= 0
    assert {stage: len(b) for stage, b in by_stage.items()} == {"look-up": 3, "compile": 3, "link": 3, "publish": 3}
    assert len({b["pid"] for b in by_stage["compile"]}) == 3
    assert len({b["pid"] for b in by_stage["look-up"]}) == 1
    begins = sorted((b["ts"], b["ts"] + b["dur"]) for b in by_stage["compile"])
    assert begins[1][0] < begins[0][1]  # two at a time
    assert max(end for _, end in begins) <= report["seconds"] * 1e6


@pytest.mark.processes
def test_waiting_and_loading_are_in_the_report_of_a_rank(settings, tmp_path):
    _, sets = _plan(tmp_path, [1])
    report = JitService("sm_90a", settings).ensure(sets)
    stages = {e["name"] for e in trace_events(report)["traceEvents"] if e["ph"] == "X"}
    assert stages == {"look-up", "compile", "link", "publish", "load"}


def test_a_place_that_cannot_be_written_is_found_out_before_the_work(tmp_path):
    check_writable(str(tmp_path / "new.json"))
    for path in (tmp_path, tmp_path / "nowhere" / "t.json"):
        with pytest.raises(UsageError, match=f"the trace cannot be written to {path}"):
            check_writable(str(path))
    code, _, err = command("muse-jit", "warmup", "--arch", "sm_90a", "--trace", tmp_path, "--cache-dir", tmp_path / "c")
    assert (code, err.count("\n")) == (2, 1)
    assert not os.path.exists(tmp_path / "c")
