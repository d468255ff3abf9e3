"""The exact terminal output of each verb on a fixed cache. `EXPECTED=write pytest ...` writes what is expected."""

import json
import os
import pathlib

import pytest
from support import fixed
from support.fixed import KEYS

from cache_tools.health import Check
from muse_jit.store.layout import Layout
from muse_jit.store.lookup import Miss, Reason
from muse_jit.store.publish import set_aside

EXPECTED = pathlib.Path(__file__).parent / "expected"

SASS = """
	.section	.text.toy_kernel,"ax",@progbits
        /*0000*/                   LDC R1, c[0x0][0x28] ;
        /*0010*/              @!P0 LDG.E.128 R4, desc[UR4][R2.64] ;
        /*0020*/                   FFMA R4, R4, R5, R6 ;
        /*0030*/                   FADD R4, R4, R5 ;
        /*0040*/               @P1 STL [R1], R4 ;
        /*0050*/                   EXIT ;
"""


@pytest.fixture
def cache(tmp_path, monkeypatch):
    fixed.stand_still(monkeypatch)
    monkeypatch.setattr("cache_tools.machine_code.sass", lambda artifact: SASS)
    return fixed.fill(tmp_path / "cache")


def _d(name, length=12):
    return KEYS[name].digest[:length]


CONSTANTS = json.dumps({"kernel": "toy", "arch": "sm_90a", "constants": {"value": 9}})
OLD = json.dumps({"kernel": "toy", "arch": "sm_90a", "constants": {"value": 4}})

VERBS = {
    "help": ["--help"],
    "ls": ["ls"],
    "ls_tree": ["ls", "--tree"],
    "ls_by_size": ["ls", "--sort", "compile", "--kernel", "toy", "--arch", "sm_90a"],
    "ls_stale": ["ls", "--toolchain", "stale"],
    "show": ["show", _d("spilling")],
    "show_dead": ["show", _d("old_toolchain")],
    "show_damaged": ["show", _d("bad_manifest")],
    "show_resources": ["show", _d("spilling"), "--resources"],
    "show_sass": ["show", _d("plain"), "--sass"],
    "stats": ["stats"],
    "stats_top": ["stats", "--top", "1"],
    "verify": ["verify"],
    "verify_some": ["verify", _d("plain"), _d("used")],
    "explain_hit": ["explain", _d("plain")],
    "explain_dead": ["explain", _d("old_toolchain")],
    "explain_damaged": ["explain", _d("bad_digest")],
    "explain_gone": ["explain", "0123456789"],
    "explain_constants": ["explain", CONSTANTS],
    "explain_edited": ["explain", OLD],
    "explain_all_parts": ["explain", _d("old_toolchain"), "--all-parts"],
    "diff": ["diff", _d("plain"), _d("spilling")],
    "prune_dry": ["prune", "--older-than", "30d", "--dry-run"],
    "prune_stale": ["prune", "--toolchain", "stale"],
    "prune_damaged": ["prune", "--damaged"],
    "prune_size": ["prune", "--max-size", "30K"],
    "clear": ["clear", "--yes"],
}
FAILS = {"show_damaged", "verify", "explain_damaged"}


@pytest.mark.parametrize("name", VERBS)
def test_output(name, cache, monkeypatch, capfd):
    monkeypatch.setenv("MUSE_JIT_CACHE_DIR", cache.root)
    code, out, err = fixed.tool(monkeypatch, capfd, *VERBS[name])
    assert (code, err) == (1 if name in FAILS else 0, "")
    _compare(name, out.replace(cache.root, "CACHE"))


def test_output_of_diff_of_caches(cache, tmp_path, monkeypatch, capfd):
    other = Layout(str(tmp_path / "other"))
    fixed.put(other, KEYS["plain"], content=b"other bytes")
    fixed.put(other, KEYS["used"], age=40, used=1, seconds=0.5)
    fixed.put(other, fixed.key(77), age=1)
    code, out, err = fixed.tool(monkeypatch, capfd, "diff", cache.root, other.root)
    assert (code, err) == (1, "")
    _compare("diff_caches", out.replace(cache.root, "CACHE").replace(other.root, "OTHER"))


def test_output_of_explain_of_a_plan(cache, tmp_path, monkeypatch, capfd):
    kernels = [{"kernel": "toy", "arch": "sm_90a", "constants": {"value": v}} for v in (1, 9, 6)]
    (tmp_path / "plan.json").write_text(json.dumps({"schema": 1, "kernels": kernels}))
    plan = tmp_path / "plan.json"
    code, out, err = fixed.tool(monkeypatch, capfd, "explain", "--plan", plan, "--cache-dir", cache.root)
    assert (code, err) == (1, "")  # one of them is damaged
    _compare("explain_plan", out.replace(cache.root, "CACHE"))


def test_output_of_explain_of_what_was_set_aside(cache, monkeypatch, capfd):
    inode = os.lstat(cache.entry(_d("bad_digest", 64))).st_ino
    folder = set_aside(cache, _d("bad_digest", 64), Miss(Reason.BAD_DIGEST, "", inode))
    code, out, err = fixed.tool(monkeypatch, capfd, "explain", _d("bad_digest"), "--cache-dir", cache.root)
    assert (code, err) == (0, "")
    _compare("explain_set_aside", out.replace(os.path.basename(folder), "FOLDER").replace(cache.root, "CACHE"))


def test_output_of_report_and_path(cache, tmp_path, monkeypatch, capfd):
    file = tmp_path / "report.html"
    code, out, err = fixed.tool(monkeypatch, capfd, "report", file, "--cache-dir", cache.root)
    assert (code, err) == (0, "")
    size = f"{file.stat().st_size / 1024:.1f} KiB"
    assert out == f"{file}: {size} about 8 entries, 2 damaged, 2 dead here\n"
    assert fixed.tool(monkeypatch, capfd, "path", "--cache-dir", cache.root) == (0, f"{cache.root}\n", "")


def test_output_of_doctor(monkeypatch, capfd):
    checks = [
        Check("folder", "ok", "/cache (option)"),
        Check("mode", "warn", "0700, narrower than MUSE_JIT_SHARE=group asks for", "chmod 750 /cache"),
        Check("linker", "fail", "cc cannot link: it is\x1b tired", "install gcc, or set CC"),
    ]
    monkeypatch.setattr("cache_tools.verbs.doctor.folder_checks", lambda *_: checks[:2])
    monkeypatch.setattr("cache_tools.health_machine.machine_checks", lambda *_: checks[2:])
    code, out, err = fixed.tool(monkeypatch, capfd, "doctor")
    assert (code, err) == (1, "")
    _compare("doctor", out)


def _compare(name, out):
    file = EXPECTED / f"{name}.txt"
    if os.environ.get("EXPECTED") == "write":
        file.write_text(out)
    assert out == file.read_text()
