"""Global and shared memory of an interpreted kernel, with the checks that make a wrong access an error."""

import re
from typing import Any

import numpy as np
from numpy.typing import NDArray

from oracle.ptx_text import PtxError

Array = NDArray[Any]
DTYPES: dict[str, Any] = {"8": np.uint8, "16": np.uint16, "32": np.uint32, "64": np.uint64}
BASE, GAP = 1 << 40, 1 << 34
"""Operand i lies at BASE + i * GAP: no arithmetic error leads from one operand into another."""
PEER = -2
"""The writer of a shared word that came from another CTA and that nobody has waited for."""


class Memory:
    """Operands by position, and one shared memory per CTA.

    Raises `PtxError` on an access outside an operand or misaligned, on two threads storing different values to one
    address in one instruction, and on reading a shared word that another warp wrote since the last barrier, or another
    CTA since the last wait for it.
    """

    def __init__(self, buffers: dict[int, Array], ctas: int, threads: int, shared_bytes: int) -> None:
        self.buffers = buffers
        self.everyone = np.ones((ctas, threads), bool)
        self.warp = np.broadcast_to(np.arange(threads) // 32, (ctas, threads))
        self.cta = np.broadcast_to(np.arange(ctas)[:, None], (ctas, threads))
        self.shared = np.zeros((ctas, max(shared_bytes // 4, 1)), np.uint32)
        self.writer = np.full(self.shared.shape, -1)
        self.reserved = np.zeros(self.shared.shape[1], bool)

    def barrier(self) -> None:
        self.writer[self.writer != PEER] = -1

    def reserve(self, address: int, words: int) -> None:
        """Shared words that hold an mbarrier: ordinary accesses to them are errors from now on."""
        place = address // 4
        if address % (4 * words) or place + words > self.reserved.size or self.reserved[place : place + words].any():
            raise PtxError("an mbarrier outside of shared memory, misaligned, or initialised twice")
        self.reserved[place : place + words] = True

    def store_from_peer(self, places: Any, offset: Array, value: Array) -> None:
        """Words at places (CTAs, words) of shared memory, unreadable until they are waited for."""
        if (offset % 4).any() or (places[1] >= self.reserved.size).any() or self.reserved[places[1]].any():
            raise PtxError("a store to a peer outside of its shared memory, misaligned, or over an mbarrier")
        if (self.writer[places] != -1).any():
            raise PtxError("a store to a peer over a word that may not have been read")
        self.shared[places] = value
        if (self.shared[places] != value).any():
            raise PtxError("two threads store different values to one word of a peer")
        self.writer[places] = PEER

    def access(self, name: str, address: Array, element: int, mask: Array | None, value: Array | None) -> Array:
        """One element of the (vector) access `name`, such as "ld.global.v4.b32"; a load if `value` is None.

        Lanes that the mask leaves out give zero.
        """
        active = self.everyone if mask is None else mask
        form = re.fullmatch(r"(?:ld|st)\.(global|shared)(?:::cta)?(?:\.v(\d))?\.b(8|16|32|64)", name)
        if form is None or (form[1] == "shared" and form[3] != "32"):
            raise PtxError(f"unknown access {name}")
        size = int(form[3]) // 8
        if (address[active] % (size * int(form[2] or 1))).any():
            raise PtxError(f"misaligned {name}")
        loaded = np.zeros(active.shape, DTYPES[form[3]])
        if not active.any():
            return loaded
        if form[1] == "global":
            operand = int(address[active][0] - BASE) // GAP
            if operand not in self.buffers:
                raise PtxError(f"{name} of an address in no operand")
            memory = self.buffers[operand].view(DTYPES[form[3]])
            places: Any = ((address - BASE - operand * GAP)[active] // size + element,)
        else:
            memory = self.shared
            places = (self.cta[active], address[active] // 4 + element)
        if (places[-1] < 0).any() or (places[-1] >= memory.shape[-1]).any():
            raise PtxError(f"{name} outside of the operand")
        if form[1] == "shared" and self.reserved[places[1]].any():
            raise PtxError(f"{name} of an mbarrier")
        if value is None:
            if form[1] == "shared":
                self._check_barrier(places, active)
            loaded[active] = memory[places]
            return loaded
        memory[places] = value[active]
        if (memory[places] != value[active]).any():
            raise PtxError(f"{name}: two threads store different values to one address")
        if form[1] == "shared":
            self.writer[places] = self.warp[active]
        return value

    def _check_barrier(self, places: Any, active: Array) -> None:
        writer = self.writer[places]
        if (writer == PEER).any():
            raise PtxError("shared memory is read before the wait for a peer's store")
        if ((writer >= 0) & (writer != self.warp[active])).any():
            raise PtxError("shared memory is read without a barrier after another warp's store")
