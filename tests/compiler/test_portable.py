"""The host code of a kernel runs on any host of its architecture, and its GPU module can be reached."""

import shutil
import subprocess

import pytest
from support.process import run

pytestmark = pytest.mark.processes

EXPORT = """
import importlib, sys
import cutlass
from muse_jit.compiler.portable import make_portable
from muse_jit.kernels.registry import family_named
from muse_jit.key.target import Target
from muse_jit import RowNormConstants
constants = RowNormConstants(hidden=2048, eps=1e-5, has_weight=True, gain_center=1.0)
module, _, name = family_named("row_norm").build.partition(":")
kernel = getattr(importlib.import_module(module), name)(constants, Target("sm_90a", 13, "x86_64"))
make_portable(kernel, "x86_64")
kernel.export_to_c({path!r}, function_name="f")
"""


def _tool(name, *arguments):
    if shutil.which(name) is None:
        pytest.skip(f"{name} is not installed")
    return subprocess.run([name, *arguments], capture_output=True, text=True, check=True).stdout


@pytest.fixture(scope="module")
def exported(tmp_path_factory):
    path = str(tmp_path_factory.mktemp("portable") / "kernel.o")
    run(EXPORT.format(path=path), block=("torch",))
    return path


def test_no_instruction_needs_more_than_the_baseline_of_the_architecture(exported):
    """AVX and later name ymm or zmm registers, or begin with v: with them a host that lacks them dies of SIGILL."""
    code = _tool("objdump", "-d", "--no-show-raw-insn", exported)
    instructions = [line.split("\t", 1)[1] for line in code.splitlines() if "\t" in line]
    assert len(instructions) > 200
    assert any("%xmm" in i for i in instructions)
    assert [i for i in instructions if "%ymm" in i or "%zmm" in i or i.startswith("v")] == []


def test_the_state_of_the_gpu_module_is_exported_under_one_name(exported):
    symbols = _tool("nm", exported)
    assert [line.split()[-2] for line in symbols.splitlines() if line.endswith("cuda_state")] == ["B"]
    assert " muse_jit_cuda_state" in symbols


def test_what_has_no_mlir_module_is_left_alone():
    out = run(
        "from muse_jit.compiler.portable import make_portable\nclass C: pass\nc = C()\n"
        "make_portable(c, 'x86_64')\nprint(vars(c))",
        block=("cutlass", "torch"),
    )
    assert out.strip() == "{}"
