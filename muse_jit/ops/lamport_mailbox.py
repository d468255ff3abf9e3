"""LamportMailbox: the memory in which ranks hand each other their parts of a sum.

BF16 [3 generations][tp ranks][capacity rows][width] on every rank, which all ranks of the group can store to. What the
kernels do with it, and why nothing in it is lost, is said in `kernels/mailbox.py`; here it is made, watched and reset.
"""

from collections.abc import Callable, Sequence
from typing import Any, Self

import torch
import torch.distributed as dist

from muse_jit.constants.all_reduce_dual_norm import TIMEOUT_S
from muse_jit.constants.mailbox import (
    CAPACITY,
    GENERATIONS,
    MAX_CAPACITY,
    SENTINEL,
    TPS,
    TRANSPORTS,
    Missing,
    Shape,
    missing_of,
)
from muse_jit.errors import RankMissing
from muse_jit.ops.device import assert_not_capturing
from muse_jit.ops.ranks import TorchPeers

WIDTH = 8192


class LamportMailbox:
    """One rank's mailbox. One serves all layers of a model, in the order in which a step runs them.

    Collective: every rank of the group makes it, with the same arguments, in the same order among its collectives.

    Args:
        device_group: the group whose memory is shared, with a CUDA backend.
        cpu_group: the same ranks with a CPU backend (gloo), for checks and barriers.
        device: this rank's device.
        width: columns of a row.
        capacity: most rows of a step.
        transport: "peer" (a store to each rank) or "multicast" (one store through a multicast address, which the
            group's symmetric memory must have; this class makes none).
        timeout_s: seconds after which a kernel gives up waiting for a rank; see `check`.
        terms: what else the ranks must agree on, such as the order of the sum.

    Raises:
        ValueError: the arguments differ between ranks (on all of them, naming one that differs), the world size is
            not 2, 4, 8 or 16, or there is no multicast address.
        CompileDuringCapture: a CUDA graph is being captured.
    """

    def __init__(
        self,
        device_group: Any,
        cpu_group: Any,
        *,
        device: torch.device,
        width: int = WIDTH,
        capacity: int = CAPACITY,
        transport: str = "peer",
        timeout_s: float = TIMEOUT_S,
        terms: dict[str, Any] | None = None,
    ) -> None:
        assert_not_capturing("LamportMailbox")
        tp, rank = dist.get_world_size(cpu_group), dist.get_rank(cpu_group)
        shape = Shape(tp, capacity, width, transport)
        mine = {"tp": tp, "width": width, "capacity": capacity, "transport": transport, "timeout_s": timeout_s}
        _require_agreement(TorchPeers(cpu_group).gather({**mine, **(terms or {})}))
        _check_shape(shape)
        buffer, addresses, multicast, self._mapped = _symmetric_buffer(shape, device, device_group, rank)
        reasons = TorchPeers(cpu_group).gather(_why_not(shape, addresses, multicast))
        for number, reason in enumerate(reasons):
            if reason is not None:
                raise ValueError(f"rank {number} has no mailbox: {reason}")
        self._assemble(shape, rank, buffer, addresses, multicast, timeout_s, lambda: dist.barrier(group=cpu_group))
        self.reset()

    @classmethod
    def stand_in(
        cls,
        tp: int,
        device: torch.device,
        *,
        width: int = WIDTH,
        capacity: int = CAPACITY,
        timeout_s: float = TIMEOUT_S,
    ) -> list[Self]:
        """The mailboxes of all `tp` ranks in one process on one device, without process groups: for tests.

        Raises:
            ValueError: a number that a mailbox cannot have.
        """
        shape = Shape(tp, capacity, width)
        _check_shape(shape)
        buffers = [_empty(shape, device) for _ in range(tp)]
        addresses, boxes = [buffer.data_ptr() for buffer in buffers], []
        for rank, buffer in enumerate(buffers):
            box = cls.__new__(cls)
            box._assemble(shape, rank, buffer, addresses, 0, timeout_s, lambda: None)
            box.reset()
            boxes.append(box)
        return boxes

    def _assemble(
        self,
        shape: Shape,
        rank: int,
        buffer: torch.Tensor,
        addresses: Sequence[int],
        multicast: int,
        timeout_s: float,
        barrier: Callable[[], None],
    ) -> None:
        self.shape, self.rank, self.buffer, self.timeout_s = shape, rank, buffer, timeout_s
        self.device = buffer.device
        self._barrier = barrier
        cyclic = [addresses[(rank + i) % shape.tp] for i in range(shape.tp)]
        self.table = torch.tensor([*cyclic, rank, multicast], dtype=torch.int64, device=self.device)
        """int64 [tp + 2]: the buffers' addresses from this rank's on, cyclically; this rank; the multicast address."""
        self.state = torch.zeros(shape.capacity, dtype=torch.int32, device=self.device)
        """int32 [capacity]: the generation of each row, which the kernels advance."""
        self.status = torch.zeros(1, dtype=torch.int32, device=self.device)
        self._published: tuple[int, str] | None = None

    def reset(self) -> None:
        """Arm the mailbox anew, whatever happened: a rank that was missing, an aborted capture, a mismatched pair.

        Collective. Waits for what runs on this rank's device, which ends by the watchdog at the latest. The rows of
        the layers that were interrupted are lost.
        """
        assert_not_capturing("the reset of a LamportMailbox")
        _synchronize(self.device)
        self._barrier()  # nobody publishes any more
        self.buffer.view(torch.int32).fill_(SENTINEL)
        self.state.zero_()
        self.status.zero_()
        self._published = None
        _synchronize(self.device)
        self._barrier()  # everybody is armed

    def missing(self) -> Missing | None:
        """What a kernel of this rank waited for in vain; None where all came. Waits for the current stream."""
        return missing_of(int(self.status.item()))

    def check(self) -> None:
        """Raise where a kernel of this rank gave up waiting. Waits for the current stream.

        From then on every boundary of this rank gives NaN and publishes nothing, until the mailbox is reset.

        Raises:
            RankMissing: naming rank and row.
        """
        lost = self.missing()
        if lost is not None:
            raise RankMissing(
                f"rank {self.rank} waited {self.timeout_s:g} s for row {lost.row} of rank {lost.rank} (generation "
                f"{lost.generation}); its boundaries give NaN until all ranks reset the mailbox"
            )

    # Who publishes in one kernel and consumes in another says so here, on the host, when it launches or is captured.

    def check_rows(self, rows: int) -> None:
        """Raises ValueError where a step has more rows than the mailbox."""
        if rows > self.shape.capacity:
            raise ValueError(f"{rows} rows; the mailbox has {self.shape.capacity}")

    def mark_published(self, rows: int, by: str) -> None:
        """`by` is about to publish `rows` rows, at least one; a kernel that consumes as many must be the next to use
        the mailbox.

        Raises:
            ValueError: too many rows, or what was published before has not been consumed.
        """
        self.check_rows(rows)
        self.check_free(by)
        self._published = (rows, by)

    def mark_consumed(self, rows: int, by: str) -> None:
        """`by` is about to consume what was published.

        Raises:
            ValueError: nothing was, or another number of rows.
        """
        if self._published is None:
            raise ValueError(f"{by} is to consume {rows} rows, but none were published before it")
        published, publisher = self._published
        if published != rows:
            raise ValueError(f"{by} is to consume {rows} rows, but {publisher} published {published}")
        self._published = None

    def check_free(self, by: str) -> None:
        """Raises ValueError where something is published that nobody has consumed; names both sides."""
        if self._published is not None:
            rows, publisher = self._published
            raise ValueError(
                f"{by} uses the mailbox while the {rows} rows that {publisher} published are not consumed; after an "
                "aborted step, reset it on all ranks"
            )

    @property
    def operands(self) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """What a consuming kernel takes last: table, state, status. A publishing one takes the first two."""
        return self.table, self.state, self.status


def _synchronize(device: torch.device) -> None:
    """Wait for a device; for the CPU, on which tests make mailboxes, there is nothing to wait for."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def _require_agreement(said: list[dict[str, Any]]) -> None:
    """Raises ValueError, with the same words on every rank, where one differs from rank 0."""
    for number, terms in enumerate(said):
        for name in sorted(said[0].keys() | terms.keys()):
            if terms.get(name) != said[0].get(name):
                raise ValueError(
                    f"the ranks' mailboxes differ: {name} is {said[0].get(name)!r} on rank 0 and {terms.get(name)!r} "
                    f"on rank {number}"
                )


def _check_shape(shape: Shape) -> None:
    if shape.tp not in TPS:
        raise ValueError(f"a mailbox is for {', '.join(map(str, TPS))} ranks, not {shape.tp}")
    if not 1 <= shape.capacity <= MAX_CAPACITY:
        raise ValueError(f"a mailbox has 1 to {MAX_CAPACITY} rows, not {shape.capacity}")
    if shape.width < 8 or shape.width % 8:
        raise ValueError(f"a mailbox has a multiple of 8 columns, not {shape.width}")
    if shape.transport not in TRANSPORTS:
        raise ValueError(f"transport {shape.transport!r}; allowed: {', '.join(TRANSPORTS)}")


def _empty(shape: Shape, device: torch.device) -> torch.Tensor:
    size = (GENERATIONS, shape.tp, shape.capacity, shape.width)
    return torch.empty(size, dtype=torch.bfloat16, device=device)


def _symmetric_buffer(
    shape: Shape, device: torch.device, group: Any, rank: int
) -> tuple[torch.Tensor, list[int], int, Any]:
    """This rank's buffer, all ranks' addresses as this device sees them, the multicast address or 0, and what keeps
    the addresses mapped. Collective."""
    import torch.distributed._symmetric_memory as symmetric

    size = (GENERATIONS, shape.tp, shape.capacity, shape.width)
    buffer = symmetric.empty(size, dtype=torch.bfloat16, device=device)
    handle = symmetric.rendezvous(buffer, group)
    first = buffer.data_ptr() - int(handle.buffer_ptrs[rank])  # where an allocator put it in the shared block
    addresses = [int(pointer) + first for pointer in handle.buffer_ptrs]
    multicast = int(handle.multicast_ptr or 0)
    return buffer, addresses, multicast + first if multicast else 0, handle


def _why_not(shape: Shape, addresses: list[int], multicast: int) -> str | None:
    """Why memory will not do as a mailbox; None where it will."""
    if len(addresses) != shape.tp or not all(addresses):
        return f"its symmetric memory reaches {sum(map(bool, addresses))} of {shape.tp} ranks"
    if shape.transport == "multicast" and not multicast:
        return "its symmetric memory has no multicast address (transport 'peer' needs none)"
    if any(address % 16 for address in (*addresses, multicast)):
        return "its symmetric memory is not aligned to 16 bytes"
    return None
