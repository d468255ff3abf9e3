"""What the small-M GEMM's kernels have in common: where a thread works, and how the parts of a sum become a result.

The warps of a block, and the blocks of a cluster, divide K. Their parts meet in shared memory and are added in a fixed
order: the same input gives the same bits, and a row's bits depend on nothing but that row.
"""

from typing import Any

from cutlass import Float32, Int32, Int64, cute
from cutlass.cutlass_dsl import T

from muse_jit.constants.mailbox import Shape
from muse_jit.constants.small_m_gemm import M_TILE, N_TILE, OUTPUTS, WARP, SmallMGemmConstants
from muse_jit.kernels import barrier, exact, memory
from muse_jit.kernels.mailbox import Mailbox, canonical

Sums = list[list[list[Float32]]]
"""Of a thread: for each 16-row tile of the weight and each 8-row tile of x the four results of an MMA fragment: row
lane / 4 of the weight with rows 2 (lane % 4) and one more of x, then the same eight rows of the weight further on."""


class Place:
    """Where a thread works: its block's outputs, its warp's tiles and share of K.

    Shared memory is the ring of operands, in whose place the parts come later, then what the blocks of a cluster
    exchange, then the mbarriers.
    """

    def __init__(self, constants: SmallMGemmConstants) -> None:
        c = self.constants = constants
        self.thread = Int32(cute.arch.thread_idx()[0])
        block = Int32(cute.arch.block_idx()[0])
        self.cluster_rank = block & Int32(c.cluster_k * c.cluster_n - 1)
        self.rank = block & Int32(c.cluster_k - 1)
        self.tile = block >> Int32(c.cluster_k.bit_length() - 1)
        self.warp = self.thread >> Int32(5)
        self.lane = self.thread & Int32(WARP - 1)
        groups = c.tile_n // (M_TILE * c.m_tiles)
        self.slice = self.warp // Int32(groups)
        self.group_row = self.warp % Int32(groups) * Int32(M_TILE * c.m_tiles)
        self.quad, self.member = self.lane >> Int32(2), self.lane & Int32(3)
        self.memory = cute.arch.alloc_smem(Float32, c.shared_bytes // 4, alignment=1024)
        self.shared = Int32(self.memory.toint())
        self.barriers = self.shared + Int32(c.barrier_offset + 16)

    def corner(self) -> Int32:
        """Address of this thread's first result in the parts: [slice][row of x][output] FP32."""
        c = self.constants
        index = self.slice * Int32(c.pitch * c.rows) + self.member * Int32(2 * c.pitch) + self.group_row + self.quad
        return self.shared + index * Int32(4)


class Result:
    """From the parts of all warps to [b, n] in global memory, and where it is to be published to every rank.

    `mailbox`: none, or the mailbox's table and state (see `kernels.mailbox`).
    """

    def __init__(
        self, constants: SmallMGemmConstants, place: Place, out: Any, rows: Int32, mailbox: tuple[Any, ...]
    ) -> None:
        c = constants
        self.constants, self.place, self.rows = constants, place, rows
        self.out = out.iterator.toint() + Int64(place.tile) * Int64(2 * c.tile_n)
        self.threads = c.warps * WARP
        self.mailbox = Mailbox(Shape(c.publish_tp, c.capacity, c.n, c.transport), *mailbox) if mailbox else None
        self.generations: list[Int32] = []
        if self.mailbox is not None:
            self.mailbox.open()

    def load_generations(self) -> None:
        """Of the rows of x whose results this thread will store. After the wait for the previous grid, which may be the
        boundary that advances them; long before they are needed."""
        if self.mailbox is not None:
            width = self.constants.tile_n // self.constants.cluster_k
            tokens = [_divided(index, width // OUTPUTS)[0] for index, _ in self.shares(width)]
            self.generations = [self.mailbox.generation(Int64(token)) for token in tokens]

    def finish(self, sums: Sums, exchange: "Exchange") -> None:
        """Add up and store. All warps that multiply call it, and no copy is in flight any more."""
        c = self.constants
        self.sync()  # the parts come where the operands were
        corner = self.place.corner()
        for m, tiles in enumerate(sums):
            for n, fragment in enumerate(tiles):
                for i, value in enumerate(fragment):
                    column, row = N_TILE * n + i % 2, M_TILE * m + 8 * (i // 2)
                    exact.statement(
                        f"st.shared.b32 [$0+{4 * (column * c.pitch + row)}], $1;",
                        "r,r",
                        corner,
                        exact.fp32_to_bits(value),
                    )
        self.sync()
        exchange.join()
        for share, (index, wanted) in enumerate(self.shares(c.tile_n)):
            token, run = _divided(index, c.tile_n // OUTPUTS)
            address = self.place.shared + token * Int32(4 * c.pitch) + run * Int32(4 * OUTPUTS)
            values = _added(address, 4 * c.pitch * c.rows, c.k_slices)
            if c.cluster_k > 1:
                exchange.send(token, run, values, wanted)
            else:
                self.store(share, token, run, values, wanted)
        if c.cluster_k > 1:
            self.finish_cluster(exchange)

    def finish_cluster(self, exchange: "Exchange") -> None:
        """Add up what the blocks of the cluster sent to this one."""
        c = self.constants
        exchange.wait()
        width = c.tile_n // c.cluster_k
        for share, (index, wanted) in enumerate(self.shares(width)):
            token, run = _divided(index, width // OUTPUTS)
            values = _added(exchange.base + index * Int32(4 * OUTPUTS), 4 * c.rows * width, c.cluster_k)
            self.store(share, token, run + self.place.rank * Int32(width // OUTPUTS), values, wanted)

    def sync(self) -> None:
        """All warps that multiply."""
        cute.arch.barrier(barrier_id=1, number_of_threads=self.threads)

    def shares(self, width: int) -> list[tuple[Int32, Int32 | None]]:
        """Which runs of OUTPUTS results of [rows, width] this thread adds up, and whether it does: a block may have
        more threads than runs; the rest read the last one's place and store nothing."""
        total = width // OUTPUTS * self.constants.rows
        found: list[tuple[Int32, Int32 | None]] = []
        for first in range(0, total, self.threads):
            index = self.place.thread + Int32(first)
            if first + self.threads <= total:
                found.append((index, None))
            else:
                wanted = Int32(index < Int32(total))
                found.append((exact.select(wanted, index, Int32(total - 1)), wanted))
        return found

    def store(self, share: int, token: Int32, run: Int32, values: list[Float32], wanted: Int32 | None) -> None:
        """OUTPUTS results of one row of x, rounded once, where there is such a row. Published first: that is a way."""
        c = self.constants
        inside = Int32(token < self.rows) if wanted is None else Int32(token < self.rows) & wanted
        words = [exact.fp32_to_bf16(values[i], values[i + 1]) for i in range(0, OUTPUTS, 2)]
        if self.mailbox is not None:
            column = self.place.tile * Int32(c.tile_n) + run * Int32(OUTPUTS)
            ready = [canonical(word) for word in words]
            self.mailbox.publish(ready, self.generations[share], Int64(token), column, own=True, inside=inside)
        target = self.out + Int64(token) * Int64(2 * c.n) + Int64(run) * Int64(2 * OUTPUTS)
        memory.store_words(target, 0, words, inside)


class Exchange:
    """How the blocks of a cluster that divide K bring their parts together: each owns some of the outputs, and the
    others send it theirs by `st.async`, which carries its own arrival, so that no block waits for another's exit."""

    def __init__(self, constants: SmallMGemmConstants, place: Place) -> None:
        self.constants, self.place = constants, place
        self.base = place.shared + Int32(constants.exchange_offset)

    def open(self) -> None:
        """This block's mbarrier is ready, and it says so; it completes when all parts are there."""
        if self.constants.cluster_k == 1:
            return
        size = self.constants.exchange_bytes
        barrier.init(self.base, {size: 1}, self.place.thread)
        cute.arch.sync_warp()  # for racecheck, which warned of these two, though one lane does both
        barrier.expect(self.base, size, size, self.place.thread)
        exact.statement("barrier.cluster.arrive.relaxed.aligned;", "")

    def join(self) -> None:
        """All blocks of the cluster run and have their mbarriers. Every warp of a block calls it."""
        if self.constants.cluster_k > 1:
            exact.statement("barrier.cluster.wait.acquire.aligned;", "")

    def send(self, token: Int32, run: Int32, values: list[Float32], wanted: Int32 | None) -> None:
        """This block's part of OUTPUTS results to the block that owns them: to [rank][row of x][its output] FP32."""
        c = self.constants
        owner, own_run = _divided(run, c.tile_n // c.cluster_k // OUTPUTS)
        slot = (self.place.rank * Int32(c.rows) + token) * Int32(c.tile_n // c.cluster_k // OUTPUTS) + own_run
        base = Int32(exact.asm(T.i32(), [self.base, owner], "mapa.shared::cluster.u32 $0, $1, $2;", "=r,r,r"))
        address = base + slot * Int32(4 * OUTPUTS)
        wanted = Int32(1) if wanted is None else wanted
        for first in range(0, OUTPUTS, 4):
            words = [exact.fp32_to_bits(value) for value in values[first : first + 4]]
            text = (
                "{ .reg .pred p; setp.ne.s32 p, $6, 0; @p st.async.shared::cluster.mbarrier::complete_tx::bytes.v4.b32 "
                f"[$0+{4 * first}], {{$2, $3, $4, $5}}, [$1+{c.exchange_bytes}]; }}"
            )
            exact.statement(text, "r,r,r,r,r,r,r", address, base, *words, wanted)

    def wait(self) -> None:
        """All parts of this block's outputs are there."""
        barrier.wait(self.base, self.constants.exchange_bytes, 0)


def _divided(index: Int32, by: int) -> tuple[Int32, Int32]:
    return index // Int32(by), index % Int32(by)


def _added(address: Int32, stride: int, parts: int) -> list[Float32]:
    """OUTPUTS neighbouring sums of each part, added in the order of the parts."""
    total: list[Float32] = []
    for part in range(parts):
        words = [w for first in (0, 16) for w in memory.load_shared(address, part * stride + first)]
        values = [exact.fp32_from_bits(word) for word in words]
        total = exact.add_all(total, values, packed=False) if part else values
    return total
