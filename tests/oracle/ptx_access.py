"""The instructions of the interpreter that reach memory: global, shared, and that of other CTAs."""

from collections.abc import Callable

import numpy as np

from oracle.ptx_cluster import Cluster
from oracle.ptx_memory import DTYPES, Array, Memory
from oracle.ptx_text import Kernel, PtxError


def _weak(parts: list[str]) -> list[str]:
    """An access without the memory order, which means nothing to threads in lock step."""
    return [parts[0], *parts[3:]] if parts[1] == "relaxed" else parts


class MemoryInstructions:
    """For the interpreter to inherit; what it uses of it is declared here."""

    kernel: Kernel
    memory: Memory
    cluster: Cluster
    shape: tuple[int, int]
    parameters: dict[str, int]
    lengths: dict[str, int]
    read: Callable[[str, str], Array]
    write: Callable[[str, Array, Array | None], None]

    def address(self, text: str, space: str) -> Array:
        base, _, offset = text.strip("[] ").partition("+")
        return self.read(base.strip(), "64" if space == "global" else "32").astype(np.int64) + int(offset or 0)

    def op_ld(self, parts: list[str], args: list[str], mask: Array | None) -> bool:
        if parts[1] == "param":
            # A tensor with rows counted at run time is a pointer and, 8 bytes on, the count.
            name, _, offset = args[1].strip("[]").partition("+")
            known = {"": self.parameters, "8": self.lengths}.get(offset, {})
            if name not in known:
                return False
            self.write(args[0], np.full(self.shape, known[name], DTYPES[parts[-1][1:]]), mask)
            return True
        parts = _weak(parts)
        address = self.address(args[1], parts[1])
        for i, target in enumerate(args[0].strip("{} ").split(",")):
            self.write(target.strip(), self.memory.access(".".join(parts), address, i, mask, None), mask)
        return True

    def op_st(self, parts: list[str], args: list[str], mask: Array | None) -> bool:
        if parts[1] == "async":
            addresses = [self.address(args[i], "shared") for i in (0, 2)]
            return self.cluster.store(".".join(parts), addresses[0], self.read(args[1], "32"), addresses[1], mask)
        parts = _weak(parts)
        address = self.address(args[0], parts[1])
        for i, source in enumerate(args[1].strip("{} ").split(",")):
            value = self.read(source.strip(), parts[-1][1:])
            self.memory.access(".".join(parts), address, i, mask, value)
        return True

    def op_atom(self, parts: list[str], args: list[str], mask: Array | None) -> bool:
        """Compare and swap. Of several threads at one word the first one goes first, and must change it."""
        if parts != ["atom", "relaxed", "gpu", "global", "cas", "b32"]:
            return False
        address, compare = self.address(args[1], "global"), self.read(args[2], "32")
        active = self.memory.everyone if mask is None else mask
        places = np.where(active, address, -1)
        first = np.zeros(active.shape, bool)
        first.reshape(-1)[np.unique(places, return_index=True)[1]] = True
        first &= active
        old = self.memory.access("ld.global.b32", address, 0, mask, None)
        self.memory.access("st.global.b32", address, 0, first, np.where(old == compare, self.read(args[3], "32"), old))
        later = self.memory.access("ld.global.b32", address, 0, mask, None)
        if ((later == compare) & active & ~first).any():
            raise PtxError("a second thread would swap the same word")
        self.write(args[0], np.where(first, old, later), mask)
        return True

    def op_mapa(self, parts: list[str], args: list[str], mask: Array | None) -> bool:
        if parts != ["mapa", "shared::cluster", "u32"]:
            return False
        self.write(args[0], self.cluster.map(self.read(args[1], "32"), self.read(args[2], "32")), mask)
        return True

    def op_mbarrier(self, parts: list[str], args: list[str], mask: Array | None) -> bool:
        address = self.address(next(a for a in args if a[0] == "["), "shared")
        if parts[1] != "try_wait":
            return self.cluster.instruction(".".join(parts), address, args[-1], mask)
        if not self.cluster.wait_for(".".join(parts), address, args[-1], mask):
            return False
        self.write(args[0], self.memory.everyone, None)
        return True
