"""`muse-jit warmup` as a person meets it: terminal and pipe, dry run, early ends, several at once."""

import json
import os
import pty
import re
import select
import signal
import subprocess
import sys
import time

import pytest
from field.barrier import together
from support import toy
from support.process import ATTENTIVE, ROOT, alive, command, environment

pytestmark = pytest.mark.processes

BEFORE = "from support import toy"


def _plan(tmp_path, values, arches=("sm_90a",), **more):
    sets = [toy.ToyConstants(value=v, count_file=str(tmp_path / "count"), **more) for v in values]
    kernels = [{"kernel": "toy", "arch": a, "constants": c.as_dict()} for c in sets for a in arches]
    path = tmp_path / "plan.json"
    path.write_text(json.dumps({"schema": 1, "kernels": kernels}))
    return path


def _warmup(tmp_path, *arguments, **variables):
    return command("muse-jit", "warmup", "--cache-dir", tmp_path / "cache", *arguments, before=BEFORE, **variables)


def _start(tmp_path, *arguments, stdout=subprocess.PIPE):
    words = ["warmup", "--cache-dir", str(tmp_path / "cache"), *map(str, arguments)]
    code = f"import sys; {ATTENTIVE}{BEFORE}\nsys.argv[1:] = {words!r}\nfrom muse_jit.cli import entry\nentry()"
    return subprocess.Popen(
        [sys.executable, "-c", code], stdout=stdout, stderr=subprocess.PIPE, text=True, cwd=ROOT, env=environment()
    )


def _until(condition, seconds=60.0):
    deadline = time.monotonic() + seconds
    while not condition() and time.monotonic() < deadline:
        time.sleep(0.01)
    return condition()


def test_in_a_pipe_there_is_a_plain_line_a_kernel_and_a_table(tmp_path):
    plan = _plan(tmp_path, [1, 2], arches=("sm_90a", "sm_100a"))
    code, out, err = _warmup(tmp_path, "--plan", plan)
    assert (code, err) == (0, "")
    lines = out.splitlines()
    for line in lines[:4]:
        assert re.fullmatch(r"compiled +\d+\.\d\d s  sm_(90|100)a +[0-9a-f]{12}  toy", line)
    assert lines[4:8] == [
        "",
        "KERNEL  ARCH     COMPILED  COMPILE",
        re.sub(r"(?<=2   ).*", lines[6][-6:], "toy     sm_90a          2   "),
        re.sub(r"(?<=2   ).*", lines[7][-6:], "toy     sm_100a         2   "),
    ]
    assert re.fullmatch(r"4 kernels: 4 compiled in \d+\.\d\d s; cache .*/cache", lines[8])
    assert "\x1b" not in out
    code, out, _ = _warmup(tmp_path, "--plan", plan, block=("cutlass", "torch", "tvm_ffi"))
    assert code == 0
    assert "4 kernels: 4 hit in" in out


def test_on_a_terminal_a_bar_names_what_is_under_way(tmp_path):
    ours, theirs = pty.openpty()
    process = _start(tmp_path, "--plan", _plan(tmp_path, [1, 2], seconds=0.5), "--jobs", 1, stdout=theirs)
    os.close(theirs)
    text = b""
    while select.select([ours], [], [], 30)[0]:
        try:
            data = os.read(ours, 1 << 16)
        except OSError:
            break
        if not data:
            break
        text += data
    os.close(ours)
    assert process.wait() == 0, process.stderr.read()
    process.stderr.close()
    shown = re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", text.decode())
    assert "0/2" in shown
    assert "2/2" in shown
    assert "toy sm_90a" in shown  # under way
    assert re.search(r"\d:\d\d:\d\d left", shown)
    assert len(re.findall(r"compiled +\d", shown)) == 2
    assert "2 kernels: 2 compiled" in shown


def test_a_dry_run_says_why_each_is_missing_and_changes_nothing(tmp_path):
    plan = _plan(tmp_path, [1, 2, 3])
    _warmup(tmp_path, "--plan", _plan(tmp_path, [1, 2]))
    plan = _plan(tmp_path, [1, 2, 3])
    (library,) = [p for p in (tmp_path / "cache").glob("entries-v1/*/*/kernel.so")][:1]
    library.write_bytes(library.read_bytes()[:-1])
    before = sorted((p, p.stat().st_mtime) for p in (tmp_path / "cache").rglob("*"))
    code, out, err = _warmup(tmp_path, "--plan", plan, "--dry-run", "--json")
    assert code == 0, err
    kernels = json.loads(out)["kernels"]
    assert sorted((k["status"], k["reason"]) for k in kernels) == [
        ("hit", None), ("planned", "absent"), ("planned", "truncated"),
    ]  # fmt: skip
    code, out, _ = _warmup(tmp_path, "--plan", plan, "--dry-run")
    assert re.search(r"planned +sm_90a +[0-9a-f]{12}  toy  truncated: kernel.so has \d+ bytes, published were \d+", out)
    assert "3 kernels: 1 hit, 2 planned" in out
    assert re.search(r"toy  absent: the nearest, [0-9a-f]{12}, has other constants\.value\n", out)
    assert sorted((p, p.stat().st_mtime) for p in (tmp_path / "cache").rglob("*")) == before


def test_a_crash_fails_one_kernel_and_the_exit_code(tmp_path):
    plan = json.loads(_plan(tmp_path, [1, 2]).read_text())
    plan["kernels"][0]["constants"]["behaviour"] = "crash"
    code, out, _ = _warmup(tmp_path, "--plan", json.dumps(plan))
    assert code == 1
    assert "killed by SIGABRT" in out
    assert "2 kernels: 1 compiled, 1 failed" in out
    code, out, _ = _warmup(tmp_path, "--plan", json.dumps(plan), "--json")
    assert (code, json.loads(out)["hits"], json.loads(out)["failed"]) == (1, 1, 1)


@pytest.mark.parametrize(
    ("number", "code", "word"), [(signal.SIGINT, 130, "interrupted"), (signal.SIGTERM, 143, "terminated")]
)
def test_a_signal_ends_everything_at_once_and_a_rerun_does_the_rest(tmp_path, number, code, word):
    plan = json.loads(_plan(tmp_path, [1, 2, 3, 4]).read_text())
    plan["kernels"][1]["constants"]["behaviour"] = "child"  # leaves a process of its own
    plan["kernels"][1]["constants"]["seconds"] = 30.0
    count = tmp_path / "count"
    process = _start(tmp_path, "--plan", json.dumps(plan), "--jobs", 1)
    assert _until((tmp_path / "count.child").exists)
    pids = [int(line.split()[0]) for line in count.read_text().splitlines()]
    pids.append(int((tmp_path / "count.child").read_text()))
    with open(f"/proc/{pids[1]}/stat") as file:
        pids.append(int(file.read().rpartition(")")[2].split()[1]))  # the server
    began = time.monotonic()
    process.send_signal(number)
    out, err = process.communicate(timeout=30)
    assert process.returncode == code
    assert err.lstrip("\n") == f"muse-jit: {word}; what was finished is kept\n"  # click ends the line of ^C
    assert _until(lambda: not any(map(alive, pids)), 5.0)
    assert time.monotonic() - began < 20
    assert out.count("compiled") == 1
    plan["kernels"][1]["constants"]["seconds"] = 0.0
    plan["kernels"][1]["constants"]["behaviour"] = "ok"
    code, out, _ = _warmup(tmp_path, "--plan", json.dumps(plan), "--json")
    assert (code, json.loads(out)["hits"], json.loads(out)["compiled"]) == (0, 1, 3)


def test_eight_at_once_on_an_empty_folder_do_the_work_of_one(tmp_path):
    plan = _plan(tmp_path, range(8), seconds=0.1)
    words = ["warmup", "--plan", str(plan), "--cache-dir", str(tmp_path / "cache"), "--json"]
    code = f"sys.argv[1:] = {words!r}\nfrom muse_jit.cli import entry\nreach()\nentry()"
    ended = together(tmp_path, [code] * 8, MUSE_JIT_WORKERS=2)
    reports = [json.loads(e.out) for e in ended]
    assert [e.code for e in ended] == [0] * 8, [e.err for e in ended]
    assert sum(r["compiled"] for r in reports) == 8 == toy.compiles(tmp_path / "count")
    assert [r["compiled"] + r["hits"] for r in reports] == [8] * 8
    assert len({server for _, _, server in toy.times(tmp_path / "count")}) == 1


def test_forced_kernels_are_compiled_again_and_their_entries_replaced(tmp_path):
    plan = _plan(tmp_path, [1, 2])
    _warmup(tmp_path, "--plan", plan)
    code, out, _ = _warmup(tmp_path, "--plan", plan, "--force", "--json")
    assert (code, json.loads(out)["compiled"]) == (0, 2)
    assert toy.compiles(tmp_path / "count") == 4
    assert {k["reason"] for k in json.loads(out)["kernels"]} == {"replaced"}
