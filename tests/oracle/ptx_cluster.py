"""Clusters of an interpreted kernel: stores into a neighbour's shared memory, and the mbarriers that count them.

All CTAs run in lock step, so nothing here can race by itself. Instead every rule that keeps a real cluster from racing
is checked, and its breach is a `PtxError`: a peer is stored to only after a cluster barrier that follows the fenced
initialisation of its mbarrier; what it stored is read only after a wait on that mbarrier; no CTA exits before it has
waited for all that is sent to it; an mbarrier that would never complete is an error instead of a hang.

Only what the kernels use is known: CTAs in one dimension, mbarriers that complete once, stores of one word.
"""

import dataclasses
from typing import Any

import numpy as np

from oracle.ptx_memory import Array, Memory
from oracle.ptx_text import PtxError

WINDOW = 1 << 24
"""The shared memory of rank r lies at (r + 1) * WINDOW among the addresses of a cluster."""


@dataclasses.dataclass
class Barrier:
    """One mbarrier in every CTA, at the same address."""

    pending: int
    """Arrivals still missing; the same in all CTAs."""
    bytes: Array
    """Bytes expected and not yet arrived, per CTA."""
    places: list[Any]
    """(CTAs, words) that its bytes went to and that nobody has waited for."""


class Cluster:
    def __init__(self, memory: Memory, ctas: int, size: int) -> None:
        if ctas % size:
            raise PtxError(f"{ctas} CTAs are no whole clusters of {size}")
        self.memory, self.ctas, self.size = memory, ctas, size
        self.barriers: dict[int, Barrier] = {}
        self.fenced, self.arrived, self.joined = True, False, False

    def map(self, address: Array, rank: Array) -> Array:
        """mapa. A rank outside the cluster gives an address that faults when used."""
        return address + (rank + 1) * WINDOW

    def whole(self, name: str) -> bool:
        """Execute an instruction without operands; whether it is a known one."""
        if name == "fence.mbarrier_init.release.cluster":
            self.fenced = True
        elif name == "barrier.cluster.arrive.relaxed.aligned":
            if not self.fenced:
                raise PtxError("relaxed arrival at the cluster barrier without a fence after mbarrier.init")
            self.arrived = True
        elif name == "barrier.cluster.wait.acquire.aligned":
            if not self.arrived:
                raise PtxError("wait at the cluster barrier without an arrival")
            self.joined = True
        else:
            return False
        return True

    def instruction(self, name: str, address: Array, count: str, mask: Array | None) -> bool:
        """mbarrier.init, or an arrival that announces bytes, by one thread of every CTA; whether it is a known one."""
        active = self.memory.everyone if mask is None else mask
        if (active.sum(axis=1) != 1).any():
            raise PtxError(f"{name} by more or fewer than one thread of a CTA")
        place = self._one_address(address, active)
        if name == "mbarrier.init.shared::cta.b64":
            self.memory.reserve(place, 2)
            self.barriers[place] = Barrier(int(count), np.zeros(self.ctas, np.int64), [])
            self.fenced = False
        elif name == "mbarrier.arrive.expect_tx.shared::cta.b64":
            barrier = self._barrier(place)
            barrier.pending -= 1
            barrier.bytes += int(count)
        else:
            return False
        return True

    def store(self, name: str, address: Array, value: Array, barrier_address: Array, mask: Array | None) -> bool:
        """st.async of one word; whether the name is that."""
        if name != "st.async.shared::cluster.mbarrier::complete_tx::bytes.b32":
            return False
        if not self.joined:
            raise PtxError("a peer is stored to before a cluster barrier said that its mbarrier is ready")
        active = self.memory.everyone if mask is None else mask
        rank, offset = np.divmod(address[active], WINDOW)
        barrier_rank, barrier_offset = np.divmod(barrier_address[active], WINDOW)
        if (rank != barrier_rank).any() or (rank < 1).any() or (rank > self.size).any():
            raise PtxError("st.async outside of the cluster, or to another CTA than its mbarrier's")
        barrier = self._barrier(self._one_address(barrier_offset, np.ones(barrier_offset.shape, bool)))
        sender = np.broadcast_to(np.arange(self.ctas)[:, None], active.shape)[active]
        target = sender - sender % self.size + rank - 1
        places = (target, offset // 4)
        self.memory.store_from_peer(places, offset, value[active])
        np.subtract.at(barrier.bytes, target, 4)
        barrier.places.append(places)
        return True

    def wait_for(self, name: str, address: Array, parity: str, mask: Array | None) -> bool:
        """A wait of all threads on an mbarrier's only phase; whether the name is that."""
        if name != "mbarrier.try_wait.parity.shared::cta.b64" or parity != "0" or mask is not None:
            return False
        barrier = self._barrier(self._one_address(address, self.memory.everyone))
        if barrier.pending or barrier.bytes.any():
            raise PtxError("a wait on an mbarrier that never completes")
        for places in barrier.places:
            self.memory.writer[places] = -1
        barrier.places.clear()
        return True

    def exit(self) -> None:
        if any(barrier.places for barrier in self.barriers.values()):
            raise PtxError("a CTA exits while its peers may still store into its shared memory")
        if self.arrived and not self.joined:
            raise PtxError("a CTA exits between arrival and wait at the cluster barrier")

    def _one_address(self, address: Array, active: Array) -> int:
        found = np.unique(address[active])
        if found.size != 1:
            raise PtxError("an mbarrier instruction on several addresses at once")
        return int(found[0])

    def _barrier(self, address: int) -> Barrier:
        if address not in self.barriers:
            raise PtxError("an mbarrier that was never initialised")
        return self.barriers[address]
