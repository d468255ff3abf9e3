import subprocess
import sys

import pytest
from support.process import ROOT, environment

pytestmark = pytest.mark.processes


def _run(tmp_path):
    """Run the example as its docstring says, from another folder."""
    done = subprocess.run(
        [sys.executable, str(ROOT / "examples/own_kernel.py")],
        capture_output=True,
        text=True,
        cwd=tmp_path,
        env=environment(MUSE_JIT_CACHE_DIR=tmp_path / "cache"),
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_a_second_process_finds_the_kernel_of_the_first(tmp_path):
    first, second = _run(tmp_path), _run(tmp_path)
    assert "compiled 1, found on disk 0" in first
    assert "compiled 0, found on disk 1" in second
    assert "compiler in this process: False" in first
    assert "compiler in this process: False" in second
    assert first.split()[2] == second.split()[2]
