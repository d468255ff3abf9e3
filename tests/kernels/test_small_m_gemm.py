"""The small-M GEMM as compiled: what is loaded when and how wide, and that nothing spills. Results: tests/gpu."""

import functools
import pathlib
import re
import tempfile
from dataclasses import dataclass

import pytest
from oracle.sass import instruction_counts, local_bytes, needs_nvdisasm

from muse_jit.constants.small_m_gemm import SmallMGemmConstants
from muse_jit.kernels import small_m_gemm

ARCHS = ("sm_90a", "sm_100a", "sm_103a", "sm_120a")
SHAPES = {
    "few rows": SmallMGemmConstants(8192, 1024, 8, 64, 16, 1, 8),
    "two tiles a warp": SmallMGemmConstants(8192, 2048, 16, 64, 8, 2, 8),
    "many rows": SmallMGemmConstants(8192, 512, 64, 32, 4, 2, 4),
}


@dataclass(frozen=True)
class Target:
    arch: str


@functools.cache
def compiled(name, arch):
    """(PTX, cubin) of one shape."""
    folder = pathlib.Path(tempfile.mkdtemp())
    small_m_gemm.build(SHAPES[name], Target(arch), dump_dir=folder)
    (text,) = folder.glob("*.ptx")
    (cubin,) = folder.glob("*.cubin")
    return text.read_text(errors="replace"), cubin.read_bytes()


@pytest.mark.parametrize("arch", ARCHS)
@pytest.mark.parametrize("name", SHAPES)
def test_the_weight_is_on_its_way_before_the_wait_and_x_is_read_after_it(name, arch):
    text, _ = compiled(name, arch)
    c = SHAPES[name]
    before, after = text.split("griddepcontrol.wait")
    weight = r"ld\.global\.L1::no_allocate\.L2::256B\.v4\.b32"
    blocks = c.k_warp // 32
    assert len(re.findall(weight, before)) == 2 * c.m_tiles * c.depth
    assert len(re.findall(weight, after)) == 2 * c.m_tiles * (blocks - c.depth)
    assert "ld.global.v4" not in before
    assert len(re.findall(r"ld\.global\.v4\.b32", after)) == c.rows // 8 * blocks
    assert not re.search(r"ld\.global[^;]*\.nc|ld\.global\.nc", text)  # the assembler would move it behind the wait
    assert len(re.findall(r"mma\.sync\.aligned\.m16n8k16", text)) == 2 * blocks * c.m_tiles * (c.rows // 8)


@needs_nvdisasm
@pytest.mark.parametrize("arch", ARCHS)
@pytest.mark.parametrize("name", SHAPES)
def test_the_assembler_keeps_loads_wide_and_spills_nothing(name, arch):
    _, cubin = compiled(name, arch)
    c = SHAPES[name]
    expected = (2 * c.m_tiles + c.rows // 8) * (c.k_warp // 32)
    assert instruction_counts(cubin)["LDG"] == expected  # none was split
    assert local_bytes(cubin) == [0]
