"""The small-M GEMM as compiled: what is sent for when, how wide, and that nothing spills. Results: tests/gpu."""

import dataclasses
import functools
import pathlib
import re
import tempfile

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


def publishing(base, tp, transport="peer", **fields):
    return dataclasses.replace(base, publish_tp=tp, transport=transport, **fields)


PUBLISHING_MMA = {
    "few rows": publishing(MMA["few rows"], 8, release_early=True),
    "a cluster divides K": publishing(MMA["a cluster divides K"], 4, capacity=16),
    "many rows": publishing(MMA["many rows"], 16),
    "no PDL": publishing(MMA["no PDL"], 2),
    "multicast": publishing(MMA["many rows"], 8, "multicast"),
}
PUBLISHING_WGMMA = {
    "few rows": publishing(WGMMA["few rows"], 4),
    "blocks that share x": publishing(WGMMA["blocks that share x"], 8),
    "warps and a cluster divide K": publishing(WGMMA["warps and a cluster divide K"], 2),
    "multicast": publishing(WGMMA["blocks that share x"], 8, "multicast"),
}
PUBLISHING = [(arch, c) for arch in ARCHS for c in PUBLISHING_MMA.values()]
PUBLISHING += [("sm_90a", c) for c in PUBLISHING_WGMMA.values()]


def name_of(case):
    if isinstance(case, str):
        return case
    cluster = f"{case.cluster_k}x{case.cluster_n}"
    return f"{case.instruction},rows={case.rows},cluster={cluster},tp={case.publish_tp},{case.transport}"


each_publishing = pytest.mark.parametrize(("arch", "c"), PUBLISHING, ids=name_of)


@dataclasses.dataclass(frozen=True)
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


def stored(c):
    """Runs of 8 results that a thread stores: with a cluster that divides K, of its block's share."""
    return -(-c.tile_n // c.cluster_k // 8 * c.rows // (32 * c.warps))


@each_publishing
def test_the_results_go_to_every_rank_in_16_bytes_and_to_the_output(arch, c):
    text, _ = compiled(c, arch)
    peer = c.transport == "peer"
    assert count(r"st\.relaxed\.sys\.global\.v4\.b32", text) == stored(c) * (c.publish_tp if peer else 0)
    assert count(r"multimem\.st\.relaxed\.sys\.global\.v4\.f32", text) == stored(c) * (not peer)
    assert count(r"\.sys\.", text) == stored(c) * (c.publish_tp if peer else 1)
    assert count(r"@p st\.global\.v4\.b32", text) == stored(c)
    # Published first: the other ranks wait for it.
    assert text.rindex(".sys.") < text.rindex("st.global.v4.b32")


@each_publishing
def test_the_table_is_read_before_the_wait_and_the_generations_after_it(arch, c):
    text, _ = compiled(c, arch)
    generation, table = r"ld\.relaxed\.gpu\.global\.b32", r"ld\.global\.b64"
    # With wgmma the warp that sends for x has a wait of its own, and only the others read generations.
    parts = text.split("griddepcontrol.wait")
    assert len(parts) == 1 + c.enable_pdl * (1 + c.wgmma)
    assert count(table, parts[0]) == count(table, text) == c.publish_tp + 2
    assert [count(generation, part) for part in parts] == [0] * (len(parts) - 1) + [stored(c)]
    multiply = "wgmma.mma_async" if c.wgmma else "mma.sync"
    assert text.index("ld.relaxed.gpu") < text.index(multiply)  # it is there long before it is needed
    assert count(r"griddepcontrol\.launch_dependents", parts[0]) == 0


@pytest.mark.parametrize(("arch", "name"), [("sm_90a", "many rows"), ("sm_100a", "few rows")])
def test_without_a_mailbox_nothing_of_it_is_there(arch, name):
    text, _ = compiled(MMA[name], arch)
    assert not re.findall(r"\.sys\.|multimem|ld\.relaxed|ld\.global\.b64", text)


@needs_nvdisasm
@each_publishing
def test_publishing_spills_nothing_and_splits_no_access(arch, c):
    _, cubin = compiled(c, arch)
    counts = instruction_counts(cubin)
    x = 0 if c.wgmma else c.rows // 8 * c.blocks
    # Of the table, what is not used is dropped: the multicast address, or the ranks' buffers.
    table = 1 + (c.publish_tp if c.transport == "peer" else 1)
    assert counts["LDG"] == x + table + stored(c)
    assert local_bytes(cubin) == [0]
