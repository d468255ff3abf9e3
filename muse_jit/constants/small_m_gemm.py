"""The constants of the small-M GEMM of the decode path: a few rows times a weight that is read once."""

import dataclasses
from typing import ClassVar, NamedTuple

from muse_jit.constants.base import ConstantSet
from muse_jit.constants.mailbox import CAPACITY, MAX_CAPACITY, TPS, TRANSPORTS

WARP = 32
K_BLOCK = 32
"""Columns of the weight that the shape counts in: 64 bytes of a row, two MMA steps."""
M_TILE, N_TILE = 16, 8
"""The MMA's tile: 16 rows of the weight (outputs) times 8 rows of x (tokens)."""
WGMMA_TILE = 64
"""Rows of the weight that four warps multiply together with wgmma."""
WGMMA_ROWS = (8, 16, 32, 48, 64)
OUTPUTS = 8
"""Outputs that a thread adds up and stores: 16 bytes."""

MAX_ROWS = 64
MAX_THREADS = 1024
CLUSTERS = (1, 2, 4, 8)
INSTRUCTIONS = ("mma", "wgmma")
WGMMA_ARCHES = ("sm_90a",)
SHARED_BYTES = {"sm_90a": 232448, "sm_100a": 232448, "sm_103a": 232448, "sm_120a": 101376}
"""Most shared memory of a block, by architecture."""


class GemmShape(NamedTuple):
    """How a GEMM is spread over the GPU. The first three are its identity in logs."""

    tile_n: int
    """Outputs (rows of the weight) of a block."""
    warps: int
    """Warps of a block that multiply."""
    m_tiles: int
    """16-row tiles of the weight that a warp holds; the warps that this leaves over divide K."""
    copy_blocks: int = 4
    """K blocks (32 columns) of a row that one copy brings."""
    stages: int = 2
    """Copies in flight, the first of them before the grid dependency wait: of each row of a warp with "mma", of all
    rows of the block with "wgmma"."""
    x_depth: int = 2
    """K blocks of x in flight, after the wait; 1 with "wgmma", where x comes with the weight."""
    cluster_k: int = 1
    """Blocks of a cluster that divide K: 1, 2, 4 or 8."""
    cluster_n: int = 1
    """Blocks of a cluster that share x, with "wgmma": 1, 2, 4 or 8."""
    instruction: str = "mma"
    """"mma" (mma.sync, everywhere) or "wgmma" (sm_90a)."""


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
    copy_blocks: int = 4
    stages: int = 2
    x_depth: int = 2
    cluster_k: int = 1
    cluster_n: int = 1
    instruction: str = "mma"
    enable_pdl: bool = True
    """Launch with programmatic dependent launch: the weight is read before the previous grid has finished."""
    release_early: bool = False
    """Let the next grid start right after the wait, not at the end; it must wait for this grid before it reads."""
    publish_tp: int = 0
    """Ranks of the mailbox that the result is published into, too: 2, 4, 8 or 16; 0: none. Its width is n."""
    transport: str = "peer"
    """The mailbox's: "peer" or "multicast"; "peer" without one."""
    capacity: int = CAPACITY
    """The mailbox's rows, at least `rows`; 64 without one."""

    @property
    def wgmma(self) -> bool:
        return self.instruction == "wgmma"

    @property
    def k_slices(self) -> int:
        """How many ways the warps of a block divide K."""
        return self.warps * self.m_tiles * M_TILE // self.tile_n

    @property
    def k_warp(self) -> int:
        """Columns of the weight that a warp takes."""
        return self.k // (self.k_slices * self.cluster_k)

    @property
    def blocks(self) -> int:
        """K blocks of a warp."""
        return self.k_warp // K_BLOCK

    @property
    def copies(self) -> int:
        """Copies that bring a warp's share of a row."""
        return self.blocks // self.copy_blocks

    @property
    def threads(self) -> int:
        """Threads of a block: with "wgmma" one more warp, which sends for the operands."""
        return (self.warps + self.wgmma) * WARP

    def validate(self) -> None:
        """Divisibility and ranges."""
        self.require_choice("instruction", INSTRUCTIONS)
        if self.rows not in range(N_TILE, MAX_ROWS + 1, N_TILE):
            self.refuse("rows", f"it must be a multiple of {N_TILE} from {N_TILE} to {MAX_ROWS}")
        most = MAX_THREADS // WARP - self.wgmma
        if not 1 <= self.warps <= most:
            self.refuse("warps", f"it must be from 1 to {most}")
        if self.m_tiles not in (1, 2, 4):
            self.refuse("m_tiles", "allowed: 1, 2, 4")
        if self.tile_n < 1 or self.tile_n % (M_TILE * self.m_tiles):
            self.refuse("tile_n", f"it must be a positive multiple of {M_TILE} * m_tiles = {M_TILE * self.m_tiles}")
        if self.n < 1 or self.n % self.tile_n:
            self.refuse("n", f"it must be a positive multiple of tile_n = {self.tile_n}")
        groups = self.tile_n // (M_TILE * self.m_tiles)
        if self.warps % groups:
            self.refuse("warps", f"it must be a multiple of tile_n / (16 m_tiles) = {groups}")
        self._validate_clusters()
        share = self.k_slices * self.cluster_k * K_BLOCK
        if self.k < 1 or self.k % share:
            self.refuse("k", f"it must be a positive multiple of {share}: {K_BLOCK} for each warp that divides it")
        if self.copy_blocks < 1 or self.blocks % self.copy_blocks:
            self.refuse("copy_blocks", f"it must divide the {self.blocks} K blocks of a warp")
        (self._validate_wgmma if self.wgmma else self._validate_mma)()
        if self.release_early and not self.enable_pdl:
            self.refuse("release_early", "it needs enable_pdl=True")
        self._validate_mailbox()

    def _validate_mailbox(self) -> None:
        if self.publish_tp not in (0, *TPS):
            self.refuse("publish_tp", f"allowed: 0, {', '.join(map(str, TPS))}")
        self.require_choice("transport", TRANSPORTS)
        if not self.publish_tp:
            for name, default in (("transport", "peer"), ("capacity", CAPACITY)):
                if getattr(self, name) != default:
                    self.refuse(name, f"without a mailbox (publish_tp=0) it must be {default!r}")
        elif not self.rows <= self.capacity <= MAX_CAPACITY:
            self.refuse("capacity", f"it must be from rows = {self.rows} to {MAX_CAPACITY}")

    def _validate_clusters(self) -> None:
        for name in ("cluster_k", "cluster_n"):
            if getattr(self, name) not in CLUSTERS:
                self.refuse(name, f"allowed: {', '.join(map(str, CLUSTERS))}")
        if self.tile_n % (OUTPUTS * self.cluster_k):
            self.refuse("cluster_k", f"tile_n = {self.tile_n} must be a multiple of {OUTPUTS} * cluster_k")
        if self.cluster_n == 1:
            return
        if not self.wgmma or self.cluster_k > 1:
            self.refuse("cluster_n", "more than 1 needs instruction 'wgmma' and cluster_k 1")
        if self.n // self.tile_n % self.cluster_n or self.rows % (N_TILE * self.cluster_n):
            self.refuse(
                "cluster_n",
                f"it must divide the {self.n // self.tile_n} tiles of n and {self.rows // N_TILE}, rows / 8",
            )

    def _validate_mma(self) -> None:
        if not 1 <= self.stages <= self.copies:
            self.refuse("stages", f"it must be from 1 to the {self.copies} copies of a warp")
        if not 1 <= self.x_depth <= self.blocks:
            self.refuse("x_depth", f"it must be from 1 to the {self.blocks} K blocks of a warp")

    def _validate_wgmma(self) -> None:
        if self.m_tiles != 1 or self.x_depth != 1:
            self.refuse("m_tiles" if self.m_tiles != 1 else "x_depth", "it must be 1 with instruction 'wgmma'")
        if self.rows not in WGMMA_ROWS:  # wgmma itself would take every multiple of 8; the compiler (4.8.1) aborts
            self.refuse("rows", f"allowed with instruction 'wgmma': {', '.join(map(str, WGMMA_ROWS))}")
        if self.tile_n % WGMMA_TILE:
            self.refuse("tile_n", f"it must be a multiple of {WGMMA_TILE} with instruction 'wgmma'")
        if self.copy_blocks % 2:
            self.refuse("copy_blocks", "it must be even with instruction 'wgmma': a swizzled line is two K blocks")
        total = self.copies * self.k_slices
        if not self.k_slices <= self.stages <= total or self.stages % self.k_slices:
            self.refuse("stages", f"it must be a multiple of {self.k_slices} from {self.k_slices} to {total}")

    @property
    def copy_pitch(self) -> int:
        """ "mma": bytes from one row of a copy to the next, an odd number of half lines, so that the two rows that a
        quarter of a warp reads at a time lie in different banks."""
        return 2 * K_BLOCK * (self.copy_blocks | 1)

    @property
    def stage_bytes(self) -> int:
        """Shared memory of one stage: of a warp's rows, or of the block's rows and those of x."""
        if self.wgmma:
            return (self.tile_n + self.rows) * 2 * K_BLOCK * self.copy_blocks
        return M_TILE * self.m_tiles * self.copy_pitch

    @property
    def ring_bytes(self) -> int:
        """Shared memory of all stages."""
        return self.stages * self.stage_bytes * (1 if self.wgmma else self.warps)

    @property
    def pitch(self) -> int:
        """FP32 values from one row of x to the next in the parts: what the four threads of a group store lies two rows,
        8 banks, apart, so that no two of a warp's meet."""
        return self.tile_n + (4 - self.tile_n) % 16

    @property
    def parts_bytes(self) -> int:
        """Shared memory in which the warps that divide K meet."""
        return 4 * self.pitch * self.rows * self.k_slices

    @property
    def exchange_bytes(self) -> int:
        """Shared memory in which the blocks that divide K meet."""
        return 4 * self.rows * self.tile_n if self.cluster_k > 1 else 0

    @property
    def barrier_bytes(self) -> int:
        """Shared memory of the mbarriers: one for the exchange, and for each stage one (of each warp), with "wgmma" a
        second that says that it is free."""
        return 8 * (2 + self.stages * (2 if self.wgmma else self.warps))

    @property
    def exchange_offset(self) -> int:
        """Where the exchange begins; before it is the ring, later the parts in its place."""
        return -(-max(self.ring_bytes, self.parts_bytes) // 16) * 16

    @property
    def barrier_offset(self) -> int:
        """Where the mbarriers begin."""
        return self.exchange_offset + self.exchange_bytes

    @property
    def shared_bytes(self) -> int:
        """Shared memory of a block."""
        return self.barrier_offset + self.barrier_bytes

    def validate_for(self, arch: str) -> None:
        """The instruction must be the architecture's, and the block's shared memory must fit."""
        if self.wgmma and arch not in WGMMA_ARCHES:
            self.refuse("instruction", f"{arch} does not have it; allowed there: 'mma'")
        if self.shared_bytes > SHARED_BYTES[arch]:
            self.refuse(
                "stages",
                f"a block would need {self.shared_bytes} bytes of shared memory, {arch} has {SHARED_BYTES[arch]}",
            )
