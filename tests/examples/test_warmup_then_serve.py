"""The example runs as it says, and every command and variable on its page exists."""

import re
import shlex
import subprocess
import sys

import pytest
from support.process import ROOT, command, environment

from muse_jit.settings import Settings

PAGE = (ROOT / "examples/warmup_then_serve.md").read_text()


def _run(tmp_path, *arguments, **variables):
    script = str(ROOT / "examples/warmup_then_serve.py")
    options = ["--tp", "1", "--cache-dir", str(tmp_path / "cache"), *arguments]
    env = environment(**variables)
    return subprocess.run([sys.executable, script, *options], capture_output=True, text=True, cwd=tmp_path, env=env)


@pytest.mark.processes
def test_filled_once_then_found(tmp_path):
    first, second = _run(tmp_path), _run(tmp_path, MUSE_JIT_MODE="forbid")
    assert first.returncode == second.returncode == 0, first.stderr + second.stderr
    assert "3 kernels for sm_90a: 0 found, 3 compiled" in first.stdout
    assert "3 kernels for sm_90a: 3 found, 0 compiled" in second.stdout
    last = first.stdout.splitlines()[-1]
    assert last.startswith(f"MUSE_JIT_CACHE_DIR={tmp_path / 'cache'} MUSE_JIT_MODE=forbid vllm serve ")
    assert last.endswith("--tensor-parallel-size 1")


def test_what_is_missing_is_said_and_exits_1(tmp_path):
    done = _run(tmp_path, MUSE_JIT_MODE="forbid")
    assert done.returncode == 1
    assert "is not in the cache" in done.stdout + done.stderr


def _warmups():
    """Every muse-jit command on the page, as arguments: shell lines and the YAML list."""
    for line in re.findall(r"muse-jit warmup --model.*", PAGE):
        yield shlex.split(line)[1:]
    for items in re.findall(r'command: \["muse-jit", (.*)\]', PAGE):
        yield [item.strip().strip('"') for item in items.split(",")]


@pytest.mark.parametrize("arguments", list(_warmups()), ids=" ".join)
def test_the_commands_on_the_page_are_accepted(tmp_path, arguments):
    code, out, err = command("muse-jit", *arguments, "--dry-run", "--cache-dir", tmp_path / "cache")
    assert code == 0, err
    assert "planned" in out


def test_the_variables_on_the_page_exist():
    known = {entry["variable"] for entry in Settings().describe().values()}
    assert set(re.findall(r"MUSE_JIT_[A-Z_]+", PAGE)) <= known
