"""Sums over a row that is shared by the CTAs of a cluster, in stock's order: how the dual norm's warps meet."""

from typing import Protocol

from cutlass import Float32, Int32, cute
from cutlass.cutlass_dsl import T

from muse_jit.constants.dual_norm import WARP, DualNormConstants
from muse_jit.kernels import barrier, exact, memory, reduction


class Place(Protocol):
    """What an exchange must know of where a thread works."""

    thread: Int32
    """In its CTA."""
    warp: Int32
    """In the row, over all its CTAs."""
    lane: Int32
    rank: Int32
    """Of its CTA in the cluster."""


class Exchange:
    """Two sums over the row, each from one value per warp of the row to every thread of it.

    The order is stock's: a butterfly over the 32 lanes of a warp, then a butterfly over the warps. Addition commutes,
    so a butterfly has one tree whoever computes it; a thread therefore reads several warps' sums at once and adds
    them itself, and shuffles remain only for the rest: two instead of five.

    In a cluster a warp's sum goes to all CTAs by `st.async`, which carries its own arrival: the bytes and the count on
    the receiver's mbarrier travel together, so the exchange costs one way through the SM network. A plain store and
    a cluster barrier would cost the store's round trip (the barrier's release waits for it) and the barrier's own.
    """

    BARRIERS = 256  # behind two times 32 slots of 4 bytes
    OWN = 272  # behind the barriers: two times 32 slots for the warps of this CTA

    def __init__(self, constants: DualNormConstants, place: Place) -> None:
        self.ctas = constants.ctas_per_row
        self.warps = self.messages = constants.row_threads // WARP
        self.reads = min(8, self.warps)
        self.groups = self.warps // self.reads
        self.thread = place.thread
        shared = cute.arch.alloc_smem(Int32, (self.OWN + 256) // 4, alignment=128)
        self.base = Int32(shared.toint())
        warp = place.warp
        # Warps that are added inside a thread, w, w + groups, w + 2 groups, ..., are neighbours in memory.
        group_bits = self.groups.bit_length() - 1
        slot = (warp & Int32(self.groups - 1)) * Int32(self.reads) + (warp >> Int32(group_bits))
        self.write_offset = slot * Int32(4)
        self.read_address = self.base + (place.thread & Int32(self.groups - 1)) * Int32(4 * self.reads)
        if self.ctas > 1:
            self.lane = place.lane
            # For lanes beyond the cluster an address that nobody uses.
            peer = exact.asm(T.i32(), [self.base, self.lane], "mapa.shared::cluster.u32 $0, $1, $2;", "=r,r,r")
            self.peer = Int32(peer)

    def open(self) -> None:
        """In a cluster: this CTA's mbarriers are ready, and it says so. Each completes once, when this one arrival and
        4 bytes with every message are there.

        Only the initialisation has to be seen by the peers, which the fence sees to: an mbarrier counts their bytes
        whether it has been told yet to expect them or not. So the arrival at the cluster barrier can be a relaxed one,
        which waits for nothing.
        """
        if self.ctas == 1:
            return
        barriers = [f"[$0+{self.BARRIERS + 8 * k}]" for k in (0, 1)]
        inits = "".join(f"@p mbarrier.init.shared::cta.b64 {barrier}, 1; " for barrier in barriers)
        expects = "".join(
            f"@p mbarrier.arrive.expect_tx.shared::cta.b64 _, {barrier}, {4 * self.messages}; " for barrier in barriers
        )
        text = f"{{ .reg .pred p; setp.eq.s32 p, $1, 0; {inits}{expects}}}"
        exact.statement(text, "r,r", self.base, self.thread)
        exact.statement("fence.mbarrier_init.release.cluster;", "")
        exact.statement("barrier.cluster.arrive.relaxed.aligned;", "")

    def join(self) -> None:
        """In a cluster: all CTAs of the row run and have their mbarriers. Called while the loads are on their way."""
        if self.ctas > 1:
            exact.statement("barrier.cluster.wait.acquire.aligned;", "")

    def send(self, k: int, value: Float32) -> None:
        """This thread's part of sum k: over the warp, and on its way to every CTA."""
        value = reduction.butterfly(value, WARP)
        if self.ctas > 1:
            self.tell(k, self.write_offset, value, self.lane)
        elif self.warps > 1:
            # Every lane stores: they carry the same bits, and a predicate would cost more than it saves.
            address = self.base + self.write_offset
            exact.statement(f"st.shared.b32 [$0+{128 * k}], $1;", "r,r", address, exact.fp32_to_bits(value))
        else:
            self.alone = value

    def tell(self, k: int, offset: Int32, value: Float32, cta: Int32) -> None:
        """Store a part of sum k to CTA `cta` of the cluster, which is in `self.peer`; nothing beyond the cluster."""
        text = (
            f"{{ .reg .pred p; setp.lt.u32 p, $3, {self.ctas}; "
            f"@p st.async.shared::cluster.mbarrier::complete_tx::bytes.b32 [$0+{128 * k}], $2, "
            f"[$1+{self.BARRIERS + 8 * k}]; }}"
        )
        exact.statement(text, "r,r,r,r", self.peer + offset, self.peer, exact.fp32_to_bits(value), cta)

    def receive(self, k: int) -> Float32:
        """Sum k, in every thread.

        After the second one no peer writes here any more, since every warp of the row has been heard twice. So a CTA
        may exit without a last cluster barrier: its own stores go to CTAs that stay until they have them.
        """
        if self.warps == 1:
            return self.alone
        if self.ctas == 1:
            cute.arch.sync_threads()
        else:
            self.await_messages(k)
        return reduction.butterfly(_folded(self.read_address, 128 * k, self.reads), self.groups)

    def await_messages(self, k: int) -> None:
        # Slots and mbarrier are this CTA's own shared memory. Acquiring at cluster scope would add nothing for them
        # but an invalidation of the L1 cache; cluster kernels wait like this for each other's bulk copies.
        barrier.wait(self.base, self.BARRIERS + 8 * k, 0)


class ExchangeByCta(Exchange):
    """The same sums with one message from each CTA to each: it adds up its own warps first.

    With 8 CTAs a row that is 8 messages a CTA and sum instead of 32. At 64 rows of 8192 on an H200 the exchange alone
    takes 2.1 us the other way, and hardly more than for one row (0.9 us) with a quarter of the messages.
    """

    def __init__(self, constants: DualNormConstants, place: Place) -> None:
        super().__init__(constants, place)
        self.messages = self.ctas
        self.own_warps = self.warps // self.ctas
        self.own_slot = self.base + (place.thread >> Int32(5)) * Int32(4)
        self.rank_offset = place.rank * Int32(4)

    def send(self, k: int, value: Float32) -> None:
        value = reduction.butterfly(value, WARP)
        if self.own_warps > 1:
            offset = self.OWN + 128 * k
            exact.statement(f"st.shared.b32 [$0+{offset}], $1;", "r,r", self.own_slot, exact.fp32_to_bits(value))
            cute.arch.sync_threads()
            value = _folded(self.base, offset, self.own_warps)
        self.tell(k, self.rank_offset, value, self.thread)

    def receive(self, k: int) -> Float32:
        self.await_messages(k)
        return _folded(self.base, 128 * k, self.ctas)


def _folded(address: Int32, offset: int, count: int) -> Float32:
    """The sum of `count` neighbouring slots in the tree of a butterfly: halves upon each other, down to one."""
    words: list[Int32] = []
    while len(words) < count:
        words += memory.load_shared(address, offset + 4 * len(words), min(4, count - len(words)))
    sums = [exact.fp32_from_bits(word) for word in words]
    while len(sums) > 1:
        half = len(sums) // 2
        sums = exact.add_all(sums[:half], sums[half:], packed=False)
    return sums[0]
