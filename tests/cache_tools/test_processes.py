"""Every verb while eight processes load, compile and prune: none crashes, none shows half an entry."""

import json
import os
import signal
import subprocess
import sys
import time

import pytest
from support.process import ROOT, environment

pytestmark = pytest.mark.processes

WORKER = """
import os, random, sys, time
from support import toy
from muse_jit.errors import MuseJitError
from muse_jit.service import JitService
from muse_jit.settings import Settings
from muse_jit.store.prune import prune
role, number, cache, stop = sys.argv[1], int(sys.argv[2]), sys.argv[3], sys.argv[4]
settings = Settings.from_environ().with_options(cache_dir=cache)
random.seed(number)
service = JitService("sm_90a", settings)
while not os.path.exists(stop):
    value = random.randrange(6)
    if role == "prune":
        prune(service.layout, max_bytes=random.choice((0, 50_000, 100_000)))
        time.sleep(0.3)
    elif role == "load":
        service = JitService("sm_90a", settings)
        if service.get(toy.ToyConstants(value=value))() != value:
            raise SystemExit("a wrong kernel")
    else:
        service.obtain(toy.ToyConstants(value=value), force=random.random() < 0.3)
"""

VERBS = (
    ["ls"], ["ls", "--tree"], ["ls", "--json", "--toolchain", "current"], ["stats"], ["stats", "--json"], ["verify"],
    ["verify", "--json"], ["explain", '{"kernel": "row_norm", "arch": "sm_90a", "constants": '
    '{"hidden": 64, "eps": 1e-5, "has_weight": true}}'], ["prune", "--dry-run", "--max-size", "1"],
    ["prune", "--older-than", "30d"], ["prune", "--damaged"], ["doctor"], ["path"], ["report", "REPORT"],
    ["clear", "--yes"], ["diff", "CACHE", "CACHE"],
)  # fmt: skip


@pytest.fixture
def busy(tmp_path):
    """Eight processes at work in one cache; ended, and looked at, afterwards."""
    cache, stop = tmp_path / "cache", tmp_path / "stop"
    roles = ["load"] * 3 + ["compile"] * 3 + ["prune"] * 2
    processes = [
        subprocess.Popen(
            [sys.executable, "-c", WORKER, role, str(number), str(cache), str(stop)],
            cwd=ROOT, env=environment(MUSE_JIT_WORKERS=2), stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
            start_new_session=True,
        )
        for number, role in enumerate(roles)
    ]  # fmt: skip
    deadline = time.monotonic() + 120
    while not (cache / "entries-v1").is_dir() and time.monotonic() < deadline:
        time.sleep(0.02)
    yield cache, processes
    stop.touch()
    for process in processes:
        try:
            _, err = process.communicate(timeout=120)
            assert process.returncode == 0, err
        finally:
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGKILL)


def _run(cache, tmp_path, arguments):
    words = {"REPORT": str(tmp_path / "r.html"), "CACHE": str(cache)}
    arguments = [words.get(a, a) for a in arguments] + ["--cache-dir", str(cache)]
    code = f"import sys; sys.argv[1:] = {arguments!r}\nimport support.toy\nfrom cache_tools.cli import entry\nentry()"
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT, env=environment(), timeout=120
    )
    return done.returncode, done.stdout, done.stderr


def test_every_verb_while_others_load_compile_and_prune(busy, tmp_path):
    cache, processes = busy
    for arguments in VERBS:
        code, out, err = _run(cache, tmp_path, arguments)
        # 1: another pruner was at work at that moment, and prune and clear say so.
        assert code == 0 or (code == 1 and "pruning this cache right now" in out), (arguments, out, err)
        assert err == "", arguments
        if "--json" in arguments:
            json.loads(out)
    assert all(p.poll() is None for p in processes)


def test_show_and_explain_of_entries_that_come_and_go(busy, tmp_path):
    cache, processes = busy
    shown = 0
    for _ in range(6):
        code, out, _ = _run(cache, tmp_path, ["ls", "--json"])
        assert code == 0
        listed = json.loads(out)["entries"]
        assert [e["damaged"] for e in listed if e["damaged"]] == []
        for entry in listed[:2]:
            for arguments in (["show", entry["digest"]], ["explain", entry["digest"]], ["verify", entry["digest"]]):
                code, out, err = _run(cache, tmp_path, arguments)
                gone = (code == 2 and "no entry's digest begins with" in err) or "absent" in out
                assert code == 0 or gone, (arguments, out, err)
                shown += code == 0
    assert shown
    assert all(p.poll() is None for p in processes)
