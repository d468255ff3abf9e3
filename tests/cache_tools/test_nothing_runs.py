"""No verb needs torch, tvm_ffi, cutlass, filelock (but to prune) or a driver, and none runs what it lists."""

import json
import pathlib
import subprocess

import pytest
from support import fixed
from support.entries import entry
from support.process import command

from muse_jit.store.layout import Layout
from muse_jit.store.publish import publish

pytestmark = pytest.mark.processes

HEAVY = ("torch", "tvm_ffi", "cutlass", "cuda", "numpy", "rich")
TRAP = """
#include <fcntl.h>
__attribute__((constructor)) static void loaded(void) {{ open("{marker}", O_CREAT | O_WRONLY, 0600); }}
int __tvm_ffi_{symbol}(void) {{ open("{marker}", O_CREAT | O_WRONLY, 0600); return 0; }}
"""
KEY = fixed.key(1, kernel="row_norm")
CONSTANTS = json.dumps({"kernel": "row_norm", "arch": "sm_90a",
                        "constants": {"hidden": 64, "eps": 1e-5, "has_weight": True}})  # fmt: skip
VERBS = [
    ["--help"], ["ls"], ["ls", "--tree"], ["ls", "--toolchain", "stale"], ["show", KEY.digest],
    ["show", KEY.digest, "--resources"], ["show", KEY.digest, "--sass"], ["stats"], ["verify"], ["verify", "--rebuild"],
    ["explain", KEY.digest], ["explain", CONSTANTS], ["diff", KEY.digest, fixed.key(2).digest],
    ["diff", "CACHE", "CACHE"], ["report", "REPORT"], ["path"], ["doctor"],
    ["prune", "--damaged"], ["prune", "--older-than", "30d", "--dry-run"],
]  # fmt: skip


def _trap(folder, marker):
    """A library that leaves a file behind when anybody opens or calls it."""
    source = TRAP.format(marker=marker, symbol=KEY.symbol)
    command = ["cc", "-shared", "-fPIC", "-x", "c", "-", "-o", str(folder / "trap.so")]
    subprocess.run(command, input=source, text=True, check=True)
    return (folder / "trap.so").read_bytes()


@pytest.fixture
def cache(tmp_path):
    layout = Layout(str(tmp_path / "cache"))
    artifact = _trap(tmp_path, tmp_path / "ran")
    publish(layout, entry(KEY, artifact), artifact)
    fixed.put(layout, fixed.key(2))
    folder = pathlib.Path(layout.entry(KEY.digest))
    for name in ("sitecustomize.py", "json.py", "click.py"):
        (folder / name).write_text(f"open({str(tmp_path / 'ran')!r}, 'w')")
    return layout


def test_the_trap_works(tmp_path):
    import ctypes

    _trap(tmp_path, tmp_path / "ran")
    ctypes.CDLL(str(tmp_path / "trap.so"))
    assert (tmp_path / "ran").exists()


def test_no_verb_runs_what_it_lists_nor_needs_anything_heavy(cache, tmp_path):
    words = {"REPORT": str(tmp_path / "r.html"), "CACHE": cache.root}
    for verb in VERBS:
        block = HEAVY if verb[0] in ("prune",) else (*HEAVY, "filelock")
        arguments = [*(words.get(a, a) for a in verb), *([] if verb == ["--help"] else ["--cache-dir", cache.root])]
        code, out, err = command("muse-cache", *arguments, block=block)
        assert code == 0 or verb == ["doctor"], (verb, out, err)  # which may find fault with this machine
        assert err == ""
    assert not (tmp_path / "ran").exists()
