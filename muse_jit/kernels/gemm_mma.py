"""The small-M GEMM with mma.sync, which every architecture has.

Each warp has a ring of its own in shared memory, which its lanes fill by bulk copies, each a piece of a row of the
weight; nobody else reads it or waits for it. Loads by the threads themselves do as well while they are few, but with a
whole tile of them in flight they block the SM's load and store unit, also for the previous grid's block that is about
to store its results there; bulk copies wait in a queue of their own. x is loaded straight into registers: with all
warps of a block on different columns no element of it is read twice.

The MMA wants of a thread two columns here and two columns eight further on. The order of the columns of a sum is free
as long as weight and x agree, so of each 32 columns thread t of a row takes 8 t to 8 t + 7, 16 bytes of both, and they
are two MMA steps. Rows of the weight are the MMA's 16 rows, rows of x its 8 columns.
"""

from typing import Any

from cutlass import Float32, Int32, Int64, cute
from cutlass.cutlass_dsl import T

from muse_jit.constants.small_m_gemm import K_BLOCK, M_TILE, N_TILE, WARP, SmallMGemmConstants
from muse_jit.kernels import barrier, exact, memory
from muse_jit.kernels.gemm_tile import Exchange, Place, Result

Words = list[Int32]
BLOCK_BYTES = 2 * K_BLOCK


class MmaGemm:
    """The kernel of one constant set. Everything decided here is decided at compile time."""

    def __init__(self, constants: SmallMGemmConstants) -> None:
        self.constants = constants

    @cute.jit
    def __call__(self, x: Any, weight: Any, out: Any, *mailbox_and_stream: Any) -> None:
        c = self.constants
        mailbox, stream = mailbox_and_stream[:-1], mailbox_and_stream[-1]
        self.kernel(x, weight, out, mailbox).launch(
            grid=(c.n // c.tile_n * c.cluster_k, 1, 1),
            block=(c.threads, 1, 1),
            cluster=(c.cluster_k, 1, 1) if c.cluster_k > 1 else None,
            stream=stream,
            use_pdl=c.enable_pdl,
        )

    @cute.kernel
    def kernel(self, x: Any, weight: Any, out: Any, mailbox: tuple[Any, ...]) -> None:
        self.trace(x, weight, out, mailbox)

    def trace(self, x: Any, weight: Any, out: Any, mailbox: tuple[Any, ...]) -> None:
        """The device code. Plain Python at compile time: every loop here is unrolled, every `if` is decided."""
        c = self.constants
        place = Place(c)
        weights = _Weights(c, place, weight)
        weights.open()
        exchange = Exchange(c, place)
        exchange.open()
        result = Result(c, place, out, Int32(cute.size(x, mode=[0])), mailbox)
        if c.enable_pdl:
            cute.arch.griddepcontrol_wait()
            if c.release_early:
                cute.arch.griddepcontrol_launch_dependents()
        tokens = _Tokens(c, place, x, result.rows)
        x_ahead = [tokens.load(block) for block in range(c.x_depth)]
        result.load_generations()
        n_tiles = c.rows // N_TILE
        sums = [[[Float32(0.0)] * 4 for _ in range(n_tiles)] for _ in range(c.m_tiles)]
        for block in range(c.blocks):
            x_words = x_ahead.pop(0)
            if block + c.x_depth < c.blocks:
                x_ahead.append(tokens.load(block + c.x_depth))
            for m, (upper, lower) in enumerate(weights.take(block)):
                for n in range(n_tiles):
                    for step in (0, 2):
                        a = (upper[step], lower[step], upper[step + 1], lower[step + 1])
                        b = (x_words[n][step], x_words[n][step + 1])
                        sums[m][n] = _mma(a, b, sums[m][n])
            weights.refill(block)
        result.finish(sums, exchange)


class _Tokens:
    """This thread's rows of x: one of each 8-row tile, on the columns of its warp."""

    def __init__(self, constants: SmallMGemmConstants, place: Place, x: Any, rows: Int32) -> None:
        c = constants
        share = place.rank * Int32(c.k_slices) + place.slice
        column = share * Int32(2 * c.k_warp) + place.member * Int32(16)
        self.rows = []
        for n in range(c.rows // N_TILE):
            token = place.quad + Int32(N_TILE * n)
            address = x.iterator.toint() + Int64(token) * Int64(2 * c.k) + Int64(column)
            self.rows.append((address, Int32(token < rows)))

    def load(self, block: int) -> list[Words]:
        """A K block of each; zeros beyond the last row."""
        return [memory.load(a, BLOCK_BYTES * block, 8, bf16=True, inside=inside).words for a, inside in self.rows]


class _Weights:
    """This warp's part of the weight, on its way to the warp's ring. A stage has an mbarrier, which completes when all
    its rows are there."""

    def __init__(self, constants: SmallMGemmConstants, place: Place, weight: Any) -> None:
        c = self.constants = constants
        self.lane = place.lane
        self.rows = M_TILE * c.m_tiles
        self.barriers = place.barriers + place.warp * Int32(8 * c.stages)
        ring = place.shared + place.warp * Int32(c.stages * c.stage_bytes)
        row = place.tile * Int32(c.tile_n) + place.group_row + place.lane
        column = (place.rank * Int32(c.k_slices) + place.slice) * Int32(2 * c.k_warp)
        self.source = weight.iterator.toint() + Int64(row) * Int64(2 * c.k) + Int64(column)
        self.target = ring + place.lane * Int32(c.copy_pitch)
        self.policy = memory.evict_first()
        self.read = ring + place.quad * Int32(c.copy_pitch) + place.member * Int32(16)

    def open(self) -> None:
        """The mbarriers are ready, and the first copies on their way."""
        barrier.init(self.barriers, {8 * stage: 1 for stage in range(self.constants.stages)}, self.lane)
        cute.arch.sync_warp()
        for copy in range(self.constants.stages):
            self.start(copy)

    def start(self, copy: int) -> None:
        """Send for a piece of every row of the warp. A lane has none, one or two: the rows are 16, 32 or 64."""
        c = self.constants
        stage = copy % c.stages
        size = BLOCK_BYTES * c.copy_blocks
        barrier.expect(self.barriers, 8 * stage, size * self.rows, self.lane)
        for first in range(0, self.rows, WARP):
            shared, offset = stage * c.stage_bytes + first * c.copy_pitch, first * 2 * c.k + copy * size
            text = (
                f"{{ .reg .pred p; setp.lt.s32 p, $3, {self.rows - first}; "
                "@p cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes.L2::cache_hint "
                f"[$0+{shared}], [$1+{offset}], {size}, [$2+{8 * stage}], $4; }}"
            )
            exact.statement(text, "r,l,r,r,l", self.target, self.source, self.barriers, self.lane, self.policy)

    def take(self, block: int) -> list[tuple[Words, Words]]:
        """A K block that was sent for: for each 16-row tile the upper and the lower row of this thread."""
        c = self.constants
        copy, inner = divmod(block, c.copy_blocks)
        stage = copy % c.stages
        if inner == 0:
            barrier.wait(self.barriers, 8 * stage, copy // c.stages % 2)
        found = []
        for m in range(c.m_tiles):
            offset = stage * c.stage_bytes + M_TILE * m * c.copy_pitch + BLOCK_BYTES * inner
            upper = memory.load_shared(self.read, offset)
            found.append((upper, memory.load_shared(self.read, offset + 8 * c.copy_pitch)))
        return found

    def refill(self, block: int) -> None:
        """A K block has been used; with the last of its copy, its stage takes the next one."""
        c = self.constants
        copy, inner = divmod(block, c.copy_blocks)
        if inner == c.copy_blocks - 1 and copy + c.stages < c.copies:
            cute.arch.sync_warp()
            self.start(copy + c.stages)


def _mma(a: tuple[Int32, ...], b: tuple[Int32, ...], c: list[Float32]) -> list[Float32]:
    """One m16n8k16 step on BF16 with FP32 sums."""
    text = (
        "mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 "
        "{$0, $1, $2, $3}, {$4, $5, $6, $7}, {$8, $9}, {$10, $11, $12, $13};"
    )
    struct = exact.struct_type([T.f32()] * 4)
    result = exact.asm(struct, [*a, *b, *c], text, "=f,=f,=f,=f,r,r,r,r,r,r,f,f,f,f")
    return exact.unpack(result, 4, T.f32(), Float32)
