import dataclasses

import pytest

from muse_jit.constants.small_m_gemm import GemmShape, SmallMGemmConstants
from muse_jit.errors import ConstantsError

BASE = SmallMGemmConstants(n=8192, k=1024, rows=8, tile_n=64, warps=16, m_tiles=1, depth=8)


def test_what_follows_from_a_shape():
    assert (BASE.k_slices, BASE.k_warp, BASE.pitch) == (4, 256, 68)
    assert BASE.shared_bytes == 4 * 68 * 8 * 4
    shape = GemmShape(64, 16, 1)
    assert tuple(shape[:3]) == (64, 16, 1)
    assert dataclasses.replace(BASE, **shape._asdict()).depth == 4


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
        ({"depth": 0}, r"depth is 0; it must be from 1 to the 8 K blocks of a warp"),
        ({"depth": 9}, r"depth is 9; "),
        ({"n": 8192.0}, r"n is 8192.0; it must be of type int exactly"),
    ],
)
def test_what_cannot_be_names_the_field(change, message):
    with pytest.raises(ConstantsError, match=rf"SmallMGemmConstants\.{message}"):
        dataclasses.replace(BASE, **change)


def test_what_does_not_fit_an_architecture_names_it():
    large = dataclasses.replace(BASE, rows=64, warps=32, depth=4)
    assert large.shared_bytes == 139264
    large.validate_for("sm_90a")
    with pytest.raises(
        ConstantsError, match=r"warps is 32; with them a block needs 139264 bytes .* sm_120a has 101376"
    ):
        large.validate_for("sm_120a")
