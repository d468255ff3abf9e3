import dataclasses

import pytest

from muse_jit.constants.small_m_gemm import GemmShape, SmallMGemmConstants
from muse_jit.errors import ConstantsError

MMA = SmallMGemmConstants(n=8192, k=1024, rows=8, tile_n=64, warps=16, m_tiles=1, copy_blocks=4, stages=2)
WGMMA = SmallMGemmConstants(8192, 1024, 64, 64, 4, 1, 4, 6, 1, cluster_n=2, instruction="wgmma")
WGMMA_K = SmallMGemmConstants(1024, 4096, 8, 64, 8, 1, 4, 4, 1, cluster_k=8, instruction="wgmma")


def test_what_follows_from_a_shape():
    assert (MMA.k_slices, MMA.k_warp, MMA.blocks, MMA.copies, MMA.threads) == (4, 256, 8, 2, 512)
    assert (MMA.copy_pitch, MMA.stage_bytes) == (5 * 64, 16 * 5 * 64)
    assert (MMA.ring_bytes, MMA.parts_bytes) == (16 * 2 * 16 * 5 * 64, 4 * 8 * 68 * 4)
    assert MMA.shared_bytes == MMA.ring_bytes + 8 * (2 + 32)
    shape = GemmShape(64, 16, 1)
    assert tuple(shape[:3]) == (64, 16, 1)
    assert dataclasses.replace(MMA, **shape._asdict()) == MMA


def test_what_follows_from_a_shape_with_wgmma():
    assert (WGMMA.k_slices, WGMMA.copies, WGMMA.threads) == (1, 8, 160)
    assert WGMMA.stage_bytes == (64 + 64) * 4 * 64  # rows of the weight and of x, four blocks of 64 bytes
    assert WGMMA.shared_bytes == 6 * WGMMA.stage_bytes + 8 * (2 + 2 * 6)
    assert (WGMMA_K.k_slices, WGMMA_K.k_warp, WGMMA_K.copies) == (2, 256, 2)
    assert WGMMA_K.exchange_bytes == 4 * 8 * 64
    assert WGMMA_K.barrier_offset % 16 == 0


def test_the_parts_take_the_place_of_the_ring_and_may_be_larger():
    many = SmallMGemmConstants(8192, 1024, 64, 16, 8, 1, 4, 1)
    assert (many.ring_bytes, many.parts_bytes) == (8 * 16 * 5 * 64, 4 * 64 * 20 * 8)
    assert many.exchange_offset == max(many.ring_bytes, many.parts_bytes)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"rows": 0}, r"rows is 0; it must be a multiple of 8 from 8 to 64"),
        ({"rows": 12}, r"rows is 12; "),
        ({"rows": 72}, r"rows is 72; "),
        ({"warps": 0}, r"warps is 0; it must be from 1 to 32"),
        ({"warps": 64}, r"warps is 64; "),
        ({"warps": 6}, r"warps is 6; it must be a multiple of tile_n / \(16 m_tiles\) = 4"),
        ({"m_tiles": 3}, r"m_tiles is 3; allowed: 1, 2, 4"),
        ({"tile_n": 40}, r"tile_n is 40; it must be a positive multiple of 16 \* m_tiles = 16"),
        ({"tile_n": 32, "m_tiles": 4}, r"tile_n is 32; it must be a positive multiple of 16 \* m_tiles = 64"),
        ({"n": 8200}, r"n is 8200; it must be a positive multiple of tile_n = 64"),
        ({"n": 0}, r"n is 0; "),
        ({"k": 1000}, r"k is 1000; it must be a positive multiple of 128"),
        ({"k": 0}, r"k is 0; "),
        ({"copy_blocks": 0}, r"copy_blocks is 0; it must divide the 8 K blocks of a warp"),
        ({"copy_blocks": 3}, r"copy_blocks is 3; "),
        ({"stages": 0}, r"stages is 0; it must be from 1 to the 2 copies of a warp"),
        ({"stages": 3}, r"stages is 3; "),
        ({"x_depth": 0}, r"x_depth is 0; it must be from 1 to the 8 K blocks of a warp"),
        ({"x_depth": 9}, r"x_depth is 9; "),
        ({"cluster_k": 3}, r"cluster_k is 3; allowed: 1, 2, 4, 8"),
        (
            {"cluster_k": 4, "tile_n": 16, "warps": 1},
            r"cluster_k is 4; tile_n = 16 must be a multiple of 8 \* cluster_k",
        ),
        ({"cluster_n": 2}, r"cluster_n is 2; more than 1 needs instruction 'wgmma' and cluster_k 1"),
        ({"instruction": "tcgen05"}, r"instruction is 'tcgen05'; "),
        ({"n": 8192.0}, r"n is 8192.0; it must be of type int exactly"),
        ({"enable_pdl": False, "release_early": True}, r"release_early is True; it needs enable_pdl=True"),
    ],
)
def test_what_cannot_be_names_the_field(change, message):
    with pytest.raises(ConstantsError, match=rf"SmallMGemmConstants\.{message}"):
        dataclasses.replace(MMA, **change)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"m_tiles": 4, "warps": 1}, r"m_tiles is 4; it must be 1 with instruction 'wgmma'"),
        ({"rows": 40, "cluster_n": 1}, r"rows is 40; allowed with instruction 'wgmma': 8, 16, 32, 48, 64"),
        ({"x_depth": 2}, r"x_depth is 2; it must be 1 with instruction 'wgmma'"),
        ({"tile_n": 32, "warps": 2}, r"tile_n is 32; it must be a multiple of 64 with instruction 'wgmma'"),
        ({"copy_blocks": 1}, r"copy_blocks is 1; it must be even"),
        ({"warps": 32}, r"warps is 32; it must be from 1 to 31"),
        ({"warps": 8, "stages": 5, "cluster_n": 1}, r"stages is 5; it must be a multiple of 2 from 2 to 8"),
        ({"stages": 9}, r"stages is 9; it must be a multiple of 1 from 1 to 8"),
        ({"cluster_k": 2}, r"cluster_n is 2; more than 1 needs instruction 'wgmma' and cluster_k 1"),
        ({"cluster_n": 8, "rows": 32}, r"cluster_n is 8; it must divide the 128 tiles of n and 4, rows / 8"),
        ({"n": 192}, r"cluster_n is 2; it must divide the 3 tiles of n and 8, rows / 8"),
    ],
)
def test_what_cannot_be_with_wgmma_names_the_field(change, message):
    with pytest.raises(ConstantsError, match=rf"SmallMGemmConstants\.{message}"):
        dataclasses.replace(WGMMA, **change)


PUBLISHING = dataclasses.replace(WGMMA, publish_tp=8)


def test_a_mailbox_is_as_large_as_it_must_be():
    assert (MMA.publish_tp, MMA.transport, MMA.capacity) == (0, "peer", 64)
    assert (PUBLISHING.publish_tp, PUBLISHING.transport, PUBLISHING.capacity) == (8, "peer", 64)
    for tp in (2, 4, 8, 16):
        made = dataclasses.replace(MMA, publish_tp=tp, transport="multicast", capacity=8)
        assert (made.publish_tp, made.transport, made.capacity) == (tp, "multicast", 8)
        assert made.shared_bytes == MMA.shared_bytes  # results go straight from registers
    assert dataclasses.replace(PUBLISHING, capacity=4096).capacity == 4096


@pytest.mark.parametrize(
    ("base", "change", "message"),
    [
        (MMA, {"publish_tp": 3}, r"publish_tp is 3; allowed: 0, 2, 4, 8, 16"),
        (MMA, {"publish_tp": 1}, r"publish_tp is 1; "),
        (MMA, {"publish_tp": -2}, r"publish_tp is -2; "),
        (MMA, {"publish_tp": True}, r"publish_tp is True; it must be of type int exactly"),
        (PUBLISHING, {"transport": "nvls"}, r"transport is 'nvls'; "),
        (MMA, {"transport": "nvls"}, r"transport is 'nvls'; "),
        (MMA, {"transport": "multicast"}, r"transport is 'multicast'; without a mailbox \(publish_tp=0\) .* 'peer'"),
        (MMA, {"capacity": 32}, r"capacity is 32; without a mailbox \(publish_tp=0\) it must be 64"),
        (PUBLISHING, {"capacity": 63}, r"capacity is 63; it must be from rows = 64 to 4096"),
        (PUBLISHING, {"capacity": 4097}, r"capacity is 4097; "),
        (PUBLISHING, {"publish_tp": 0, "capacity": 128}, r"capacity is 128; without a mailbox"),
    ],
)
def test_what_cannot_be_of_a_mailbox_names_the_field(base, change, message):
    with pytest.raises(ConstantsError, match=rf"SmallMGemmConstants\.{message}"):
        dataclasses.replace(base, **change)


def test_what_does_not_fit_an_architecture_names_it():
    large = dataclasses.replace(WGMMA, stages=7)
    large.validate_for("sm_90a")
    with pytest.raises(ConstantsError, match=r"instruction is 'wgmma'; sm_100a does not have it; allowed there: 'mma'"):
        large.validate_for("sm_100a")
    large = dataclasses.replace(MMA, warps=4, k=2048, copy_blocks=16)
    assert large.shared_bytes == 4 * 2 * 16 * 17 * 64 + 8 * (2 + 8)
    large.validate_for("sm_100a")
    with pytest.raises(ConstantsError, match=r"stages is 2; a block would need 139344 bytes .* sm_120a has 101376"):
        large.validate_for("sm_120a")
