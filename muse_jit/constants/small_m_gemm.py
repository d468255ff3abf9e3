"""The constants of the small-M GEMM of the decode path: a few rows times a weight that is read once."""

import dataclasses
from typing import ClassVar, NamedTuple

from muse_jit.constants.base import ConstantSet

WARP = 32
K_BLOCK = 32
"""Columns of the weight that a warp takes at a time: 16 bytes for each of the four threads of a row, two MMA steps."""

M_TILE, N_TILE = 16, 8
"""The MMA's tile: 16 rows of the weight (outputs) times 8 rows of x (tokens)."""

MAX_ROWS = 64
MAX_THREADS = 1024
SHARED_BYTES = {"sm_90a": 232448, "sm_100a": 232448, "sm_103a": 232448, "sm_120a": 101376}
"""Most shared memory of a block, by architecture."""


class GemmShape(NamedTuple):
    """How a GEMM is spread over the GPU. The first three are its identity in logs."""

    tile_n: int
    """Outputs (rows of the weight) of a block."""
    warps: int
    """Warps of a block."""
    m_tiles: int
    """16-row tiles of the weight that a warp holds; the warps that this leaves over divide K."""
    depth: int = 4
    """K blocks of the weight in flight before the first is used; all of them go out before the grid dependency wait."""


@dataclasses.dataclass(frozen=True, eq=False)
class SmallMGemmConstants(ConstantSet):
    """What one small-M GEMM is specialised on: out [b, n] = x [b, k] weight [n, k]^T, 1 <= b <= rows at run time.

    Operands and result BF16, sums FP32.

    Raises:
        ConstantsError: naming the field, its value and what is allowed.
    """

    family: ClassVar[str] = "small_m_gemm"

    n: int
    """Outputs: a positive multiple of tile_n."""
    k: int
    """Length of the sums: a positive multiple of 32 for each warp's share."""
    rows: int
    """Most rows of x: a multiple of 8 from 8 to 64."""
    tile_n: int
    warps: int
    m_tiles: int
    depth: int = 4
    enable_pdl: bool = True
    """Launch with programmatic dependent launch: the weight is read before the previous grid has finished."""
    release_early: bool = False
    """Let the next grid start right after the wait, not at the end; it must wait for this grid before it reads."""

    @property
    def k_slices(self) -> int:
        """Warps of a block that divide K."""
        return self.warps * self.m_tiles * M_TILE // self.tile_n

    @property
    def k_warp(self) -> int:
        """Columns of the weight that a warp takes."""
        return self.k // self.k_slices

    def validate(self) -> None:
        """Divisibility and ranges."""
        if self.rows not in range(N_TILE, MAX_ROWS + 1, N_TILE):
            self.refuse("rows", f"it must be a multiple of {N_TILE} from {N_TILE} to {MAX_ROWS}")
        if not 1 <= self.warps <= MAX_THREADS // WARP:
            self.refuse("warps", f"it must be from 1 to {MAX_THREADS // WARP}")
        if self.m_tiles not in (1, 2, 4):
            self.refuse("m_tiles", "allowed: 1, 2, 4")
        if self.tile_n < 1 or self.tile_n % (M_TILE * self.m_tiles):
            self.refuse("tile_n", f"it must be a positive multiple of {M_TILE} * m_tiles = {M_TILE * self.m_tiles}")
        if self.n < 1 or self.n % self.tile_n:
            self.refuse("n", f"it must be a positive multiple of tile_n = {self.tile_n}")
        groups = self.tile_n // (M_TILE * self.m_tiles)
        if self.warps % groups:
            self.refuse("warps", f"it must be a multiple of tile_n / (16 m_tiles) = {groups}")
        share = self.k_slices * K_BLOCK
        if self.k < 1 or self.k % share:
            self.refuse("k", f"it must be a positive multiple of {share}: {K_BLOCK} for each warp that divides it")
        if not 1 <= self.depth <= self.k_warp // K_BLOCK:
            self.refuse("depth", f"it must be from 1 to the {self.k_warp // K_BLOCK} K blocks of a warp")

    @property
    def pitch(self) -> int:
        """FP32 values from one row of x to the next in shared memory: the parts that the four threads of a group store
        lie two rows, 8 banks, apart, so that no two of a warp's meet."""
        return self.tile_n + (4 - self.tile_n) % 16

    @property
    def shared_bytes(self) -> int:
        """Shared memory of a block, in which the warps that divide K meet."""
        return 4 * self.pitch * self.rows * self.k_slices

    def validate_for(self, arch: str) -> None:
        """The block's shared memory must fit."""
        if self.shared_bytes > SHARED_BYTES[arch]:
            limit = SHARED_BYTES[arch]
            self.refuse(
                "warps", f"with them a block needs {self.shared_bytes} bytes of shared memory, {arch} has {limit}"
            )
