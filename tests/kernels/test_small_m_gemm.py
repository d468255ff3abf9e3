"""The small-M GEMM as compiled: what is sent for when, how wide, and that nothing spills. Results: tests/gpu."""

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
MMA = {
    "few rows": SmallMGemmConstants(8192, 1024, 8, 32, 4, 1, 4, 2, 8),
    "a cluster divides K": SmallMGemmConstants(512, 4096, 16, 32, 4, 2, 8, 1, 4, cluster_k=4),
    "many rows": SmallMGemmConstants(8192, 512, 64, 32, 4, 2, 2, 2, 1),
    "no PDL": SmallMGemmConstants(8192, 512, 8, 32, 4, 2, 4, 1, 2, enable_pdl=False),
}
WGMMA = {
    "few rows": SmallMGemmConstants(8192, 1024, 8, 64, 4, 1, 8, 4, 1, instruction="wgmma"),
    "blocks that share x": SmallMGemmConstants(8192, 1024, 64, 64, 4, 1, 4, 6, 1, 1, 2, "wgmma", release_early=True),
    "warps and a cluster divide K": SmallMGemmConstants(1024, 4096, 16, 64, 8, 1, 2, 4, 1, 4, instruction="wgmma"),
}


@dataclass(frozen=True)
class Target:
    arch: str


@functools.cache
def compiled(constants, arch):
    """(PTX, cubin)."""
    folder = pathlib.Path(tempfile.mkdtemp())
    small_m_gemm.build(constants, Target(arch), dump_dir=folder)
    (text,) = folder.glob("*.ptx")
    (cubin,) = folder.glob("*.cubin")
    return text.read_text(errors="replace"), cubin.read_bytes()


def count(pattern, text):
    return len(re.findall(pattern, text))


@pytest.mark.parametrize("arch", ARCHS)
@pytest.mark.parametrize("name", MMA)
def test_mma_the_weight_is_on_its_way_before_the_wait_and_x_is_read_after_it(name, arch):
    c = MMA[name]
    text, _ = compiled(c, arch)
    assert count("griddepcontrol.wait", text) == c.enable_pdl
    before, after = text.split("griddepcontrol.wait") if c.enable_pdl else (text, text)
    copy = r"cp\.async\.bulk\.shared::cluster\.global\.mbarrier::complete_tx::bytes\.L2::cache_hint"
    each = max(1, 16 * c.m_tiles // 32)  # lanes send for a row each
    assert count(copy, before) == each * (c.stages if c.enable_pdl else c.copies)
    assert count(copy, text) == each * c.copies
    assert "evict_first" in text
    sizes = re.findall(rf"{copy} \[[^]]*\], \[[^]]*\], (\d+),", text)
    assert set(map(int, sizes)) == {64 * c.copy_blocks}
    assert "ld.global.v4" not in before or not c.enable_pdl
    assert count(r"ld\.global\.v4\.b32", after) == c.rows // 8 * c.blocks
    assert "ld.global.nc" not in text  # the assembler would move it across the wait
    assert count(r"mma\.sync\.aligned\.m16n8k16", text) == 2 * c.blocks * c.m_tiles * (c.rows // 8)
    assert count(r"st\.async\.shared::cluster", text) == (2 * runs(c) if c.cluster_k > 1 else 0)


def runs(c):
    """Runs of 8 results that a thread adds up of its block."""
    return -(-c.tile_n // 8 * c.rows // (32 * c.warps))


@pytest.mark.parametrize("name", WGMMA)
def test_wgmma_the_weight_is_on_its_way_before_the_wait_and_x_is_sent_for_after_it(name):
    c = WGMMA[name]
    text, _ = compiled(c, "sm_90a")
    before, after = text.split("griddepcontrol.wait")
    boxes = c.copy_blocks // 2  # a tensor copy is one swizzled line of 128 bytes wide
    total = c.copies * c.k_slices
    copy = r"cp\.async\.bulk\.tensor\.2d\.shared::\w+\.global\.tile\.mbarrier::complete_tx::bytes"
    shared = copy + r"\.multicast::cluster"
    assert "evict_first" in before
    assert count(copy, before) == boxes * c.stages
    assert count(copy, text) == 2 * boxes * total
    assert count(shared, text) == (boxes * total if c.cluster_n > 1 else 0)
    assert count(rf"wgmma\.mma_async\.sync\.aligned\.m64n{c.rows}k16\.f32\.bf16\.bf16", text) == c.blocks * 2
    assert "ld.global" not in text
    assert count(r"mapa\.shared::cluster", text) >= (c.cluster_n > 1) * (c.stages < total)
    assert count("griddepcontrol.launch_dependents", after) == c.release_early


@needs_nvdisasm
@pytest.mark.parametrize("arch", ARCHS)
@pytest.mark.parametrize("name", MMA)
def test_mma_the_assembler_keeps_accesses_wide_and_spills_nothing(name, arch):
    c = MMA[name]
    _, cubin = compiled(c, arch)
    counts = instruction_counts(cubin)
    assert counts["LDG"] == c.rows // 8 * c.blocks  # none was split
    assert counts["HMMA"] == 2 * c.blocks * c.m_tiles * (c.rows // 8)
    assert local_bytes(cubin) == [0]


@needs_nvdisasm
@pytest.mark.parametrize("name", WGMMA)
def test_wgmma_the_assembler_serialises_and_spills_nothing(name):
    c = WGMMA[name]
    _, cubin = compiled(c, "sm_90a")
    counts = instruction_counts(cubin)
    assert counts["HGMMA"] == 2 * c.blocks
    assert counts["UTMALDG"] == c.copy_blocks * c.copies * c.k_slices
    assert counts["LDG"] == 0
    assert local_bytes(cubin) == [0]
