"""The instructions of the interpreter that reach memory: global, shared, and that of other CTAs."""

from collections.abc import Callable

import numpy as np

from oracle.ptx_cluster import Cluster
from oracle.ptx_memory import DTYPES, Array, Memory
from oracle.ptx_text import Kernel


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
        address = self.address(args[1], parts[1])
        for i, target in enumerate(args[0].strip("{} ").split(",")):
            self.write(target.strip(), self.memory.access(".".join(parts), address, i, mask, None), mask)
        return True

    def op_st(self, parts: list[str], args: list[str], mask: Array | None) -> bool:
        if parts[1] == "async":
            addresses = [self.address(args[i], "shared") for i in (0, 2)]
            return self.cluster.store(".".join(parts), addresses[0], self.read(args[1], "32"), addresses[1], mask)
        address = self.address(args[0], parts[1])
        for i, source in enumerate(args[1].strip("{} ").split(",")):
            value = self.read(source.strip(), parts[-1][1:])
            self.memory.access(".".join(parts), address, i, mask, value)
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
