"""The small-M GEMM with wgmma, the warpgroup instruction of sm_90a.

Both operands come to shared memory by tensor copies, in the swizzled layout in which wgmma reads them there: nothing
passes through registers but the sums. One more warp sends for them, the weight of the first stages before the wait for
the previous grid, on which it does not depend, and x after it. Rows of x beyond the last are filled with zeros by the
copies.

The blocks of a cluster can share x: each sends for its part of the rows, and the copy delivers it to all of them. At 64
rows, where every block reads as much of x as of the weight, that was to spare the L2; on an H200 it was slower in every
case, so no shipped shape has it (benchmarks/notes.md).
"""

from typing import Any

from cutlass import BFloat16, Float32, Int16, Int32, Int64, cute
from cutlass.cute import nvgpu
from cutlass.cute.nvgpu import cpasync, warpgroup

from muse_jit.constants.small_m_gemm import K_BLOCK, M_TILE, N_TILE, WARP, WGMMA_TILE, SmallMGemmConstants
from muse_jit.kernels import barrier, exact, memory
from muse_jit.kernels.gemm_tile import Exchange, Place, Result

STEP = 16
"""Columns of one instruction."""


class WgmmaGemm:
    """The kernel of one constant set. Everything decided here is decided at compile time."""

    def __init__(self, constants: SmallMGemmConstants) -> None:
        c = self.constants = constants
        self.width = K_BLOCK * c.copy_blocks
        self.total = c.copies * c.k_slices
        # A condition at run time wants its values from outside; what the two kinds of warps need is kept here instead.
        self.loader: Any = None
        self.multiplier: Any = None

    @cute.jit
    def __call__(self, x: Any, weight: Any, out: Any, *mailbox_and_stream: Any) -> None:
        c = self.constants
        mailbox, stream = mailbox_and_stream[:-1], mailbox_and_stream[-1]
        line = warpgroup.make_smem_layout_atom(warpgroup.SmemLayoutAtomKind.K_SW128, BFloat16)
        w_layout = cute.tile_to_shape(line, (c.tile_n, self.width, c.stages), (0, 1, 2))
        x_layout = cute.tile_to_shape(line, (c.rows, self.width, c.stages), (0, 1, 2))
        one = (None, None, 0)
        w_copy, w_source = cpasync.make_tiled_tma_atom(
            cpasync.CopyBulkTensorTileG2SOp(), weight, cute.slice_(w_layout, one), (c.tile_n, self.width)
        )
        shared = cpasync.CopyBulkTensorTileG2SMulticastOp() if c.cluster_n > 1 else cpasync.CopyBulkTensorTileG2SOp()
        x_copy, x_source = cpasync.make_tiled_tma_atom(
            shared, x, cute.slice_(x_layout, one), (c.rows, self.width), c.cluster_n
        )
        source, major = warpgroup.OperandSource.SMEM, nvgpu.OperandMajorMode.K
        operation = warpgroup.MmaF16BF16Op(BFloat16, Float32, (WGMMA_TILE, c.rows, STEP), source, major, major)
        mma = cute.make_tiled_mma(operation, (c.tile_n // WGMMA_TILE, 1, 1))
        cluster = c.cluster_k * c.cluster_n
        self.kernel(x, out, mailbox, w_copy, w_source, x_copy, x_source, w_layout, x_layout, mma).launch(
            grid=(c.n // c.tile_n * c.cluster_k, 1, 1),
            block=(c.threads, 1, 1),
            cluster=(cluster, 1, 1) if cluster > 1 else None,
            stream=stream,
            use_pdl=c.enable_pdl,
        )

    @cute.kernel
    def kernel(
        self,
        x: Any,
        out: Any,
        mailbox: tuple[Any, ...],
        w_copy: Any,
        w_source: Any,
        x_copy: Any,
        x_source: Any,
        w_layout: cute.ComposedLayout,
        x_layout: cute.ComposedLayout,
        mma: cute.TiledMma,
    ) -> None:
        c = self.constants
        place = Place(c)
        memory_ = cute.recast_ptr(place.memory, dtype=BFloat16)
        w_shared = _tensor(memory_, w_layout)
        x_shared = _tensor(memory_ + c.stages * c.tile_n * self.width, x_layout)
        exchange = Exchange(c, place)
        result = Result(c, place, out, Int32(cute.size(x, mode=[0])), mailbox)
        self.loader = _Loader(self, place, exchange, (w_copy, w_source, w_shared), (x_copy, x_source, x_shared))
        self.multiplier = _Multiplier(self, place, exchange, result, mma, w_shared, x_shared)
        warp = cute.arch.make_warp_uniform(place.warp)
        self.loader.open()
        if warp == c.warps:
            self.loader.send_weight()
        cute.arch.sync_threads()
        if warp == c.warps:
            self.loader.run()
        else:
            self.multiplier.run()


class _Loader:
    """The warp that sends for the operands. Each stage has an mbarrier that completes when both are there, and one that
    completes when all warps that read the stage, in all blocks that share x, have done so."""

    def __init__(self, gemm: WgmmaGemm, place: Place, exchange: Exchange, weight: Any, x: Any) -> None:
        c = self.constants = gemm.constants
        self.gemm, self.place, self.exchange = gemm, place, exchange
        self.w_copy, w_source, w_shared = weight
        self.x_copy, x_source, x_shared = x
        self.barriers = cute.recast_ptr(place.memory, dtype=Int64) + (c.barrier_offset + 16) // 8
        w_tiles = cute.local_tile(w_source, (c.tile_n, gemm.width), (place.tile, None))
        x_tiles = cute.local_tile(x_source, (c.rows, gemm.width), (0, None))
        self.w = _partition(self.w_copy, 0, 1, w_shared, w_tiles)
        peer = place.cluster_rank if c.cluster_n > 1 else 0
        self.x = _partition(self.x_copy, peer, c.cluster_n, x_shared, x_tiles)
        self.first = place.rank * Int32(gemm.total)
        self.policy = memory.evict_first()

    def open(self) -> None:
        """All mbarriers are ready, of which the cluster's other blocks are told."""
        c = self.constants
        readers = c.tile_n // M_TILE * c.cluster_n
        counts = {8 * stage: 1 for stage in range(c.stages)}
        counts |= {8 * (c.stages + stage): readers for stage in range(c.stages)}
        thread = self.place.thread - Int32(c.warps * WARP)
        self.exchange.open()
        barrier.init(self.place.barriers, counts, thread)
        if c.cluster_n > 1:
            exact.statement("barrier.cluster.arrive.release.aligned;", "")

    def send_weight(self) -> None:
        """The weight of the first stages, before anything is waited for. The same warp has made the mbarriers."""
        cute.arch.sync_warp()
        for copy in range(self.constants.stages):
            self.send_w(copy)

    def send_w(self, copy: int) -> None:
        """A copy of the weight, with its stage told what to expect."""
        c = self.constants
        stage = copy % c.stages
        barrier.expect(self.place.barriers, 8 * stage, c.stage_bytes, self.place.lane)
        shared, source = self.w
        arrival = self.barriers + stage
        cute.copy(
            self.w_copy,
            source[None, self.first + copy],
            shared[None, stage],
            tma_bar_ptr=arrival,
            cache_policy=self.policy,
        )

    def send_x(self, copy: int) -> None:
        """The columns of x that go with it: this block's part of the rows, to all that share x."""
        c = self.constants
        stage = copy % c.stages
        shared, source = self.x
        options = {"tma_bar_ptr": self.barriers + stage}
        if c.cluster_n > 1:
            options["mcast_mask"] = Int16((1 << c.cluster_n) - 1)
        cute.copy(self.x_copy, source[None, self.first + copy], shared[None, stage], **options)

    def run(self) -> None:
        """Everything else, stage by stage as they become free."""
        c = self.constants
        if c.enable_pdl:
            cute.arch.griddepcontrol_wait()
            if c.release_early:
                cute.arch.griddepcontrol_launch_dependents()
        if c.cluster_n > 1:
            exact.statement("barrier.cluster.wait.acquire.aligned;", "")
        for copy in range(c.stages):
            self.send_x(copy)
        for copy in range(c.stages, self.gemm.total):
            barrier.wait(self.place.barriers, 8 * (c.stages + copy % c.stages), (copy // c.stages - 1) % 2)
            self.send_w(copy)
            self.send_x(copy)
        self.exchange.join()


class _Multiplier:
    """The warps that multiply: four for 64 rows of the weight, and as many more as divide K, copy by copy in turn."""

    def __init__(
        self, gemm: WgmmaGemm, place: Place, exchange: Exchange, result: Result, mma: Any, w_shared: Any, x_shared: Any
    ) -> None:
        self.constants, self.gemm, self.place = gemm.constants, gemm, place
        self.exchange, self.result = exchange, result
        self.mma, self.w_shared, self.x_shared = mma, w_shared, x_shared

    def run(self) -> None:
        c, mma = self.constants, self.mma
        if c.publish_tp and c.enable_pdl:
            cute.arch.griddepcontrol_wait()
        self.result.load_generations()
        if c.cluster_n > 1:
            exact.statement("barrier.cluster.wait.acquire.aligned;", "")
        slice_threads = c.tile_n // M_TILE * WARP
        whole = c.k_slices == 1
        k_slice = 0 if whole else cute.arch.make_warp_uniform(self.place.slice)
        barriers = self.place.barriers if whole else self.place.barriers + k_slice * Int32(8)
        mine = mma.get_slice(self.place.thread if whole else self.place.thread % Int32(slice_threads))
        weight = mma.make_fragment_A(mine.partition_A(self.w_shared))
        x = mma.make_fragment_B(mine.partition_B(self.x_shared))
        sums = cute.make_rmem_tensor(mma.partition_shape_C((c.tile_n, c.rows)), Float32)
        mma.set(warpgroup.Field.ACCUMULATE, False)
        for copy in range(0, self.gemm.total, c.k_slices):
            first = copy % c.stages
            stage = first if whole else Int32(first) + k_slice
            barrier.wait(barriers, 8 * first, copy // c.stages % 2)
            warpgroup.fence()
            for step in range(self.gemm.width // STEP):
                cute.gemm(mma, sums, weight[None, None, step, stage], x[None, None, step, stage], sums)
                mma.set(warpgroup.Field.ACCUMULATE, True)
            warpgroup.commit_group()
            if copy + c.stages < self.gemm.total:
                warpgroup.wait_group(0)
                self.free(barriers, 8 * (c.stages + first))
        warpgroup.wait_group(0)
        fragments = [[sums[4 * n + i] for i in range(4)] for n in range(c.rows // N_TILE)]
        self.result.finish([fragments], self.exchange)

    def free(self, barriers: Int32, offset: int) -> None:
        """This warp has read a stage: one lane for each block that fills it says so there."""
        c = self.constants
        if c.cluster_n == 1:
            arrive = f"@p mbarrier.arrive.shared::cta.b64 _, [$0+{offset}];"
        else:
            arrive = (
                f".reg .b32 remote; @p mapa.shared::cluster.u32 remote, $0, $1; "
                f"@p mbarrier.arrive.release.cluster.shared::cluster.b64 _, [remote+{offset}];"
            )
        text = f"{{ .reg .pred p; setp.lt.s32 p, $1, {c.cluster_n}; {arrive} }}"
        exact.statement(text, "r,r", barriers, self.place.lane)


def _tensor(pointer: Any, layout: cute.ComposedLayout) -> Any:
    return cute.make_tensor(cute.recast_ptr(pointer, layout.inner, BFloat16), layout.outer)


def _partition(copy: Any, part: Any, parts: int, shared: Any, tiles: Any) -> Any:
    """Shared and global memory of a copy, as [what one copy moves, which copy]."""
    blocks = cute.make_layout(parts)
    return cpasync.tma_partition(copy, part, blocks, cute.group_modes(shared, 0, 2), cute.group_modes(tiles, 0, 2))
