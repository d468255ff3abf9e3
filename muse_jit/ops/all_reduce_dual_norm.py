"""AllReduceDualNorm: an all-reduce and the residual boundary behind it, in one kernel, over one mailbox."""

import dataclasses
from typing import Any, Self

import torch

from muse_jit.constants.all_reduce_dual_norm import SUM_ORDERS, TIMEOUT_S, AllReduceDualNormConstants
from muse_jit.constants.dual_norm import DualNormConstants
from muse_jit.constants.mailbox import CAPACITY
from muse_jit.ops.device import assert_not_capturing, check_operand, service_for
from muse_jit.ops.dual_norm import DualNorm
from muse_jit.ops.lamport_mailbox import LamportMailbox


class AllReduceDualNorm:
    """What all layers of a model share: the mailbox, and a kernel for each constant set.

    Collective, as `LamportMailbox`.

    Args:
        device_group, cpu_group: the tensor parallel group, with a CUDA backend and with a CPU one.
        device: this rank's device.
        sum_order: "mnnvl" or "node-local", in which stock's all-reduce sums.
        capacity, transport, timeout_s, width: as `LamportMailbox`.

    Raises:
        ValueError: an unknown order, or as `LamportMailbox`.
        CompileDuringCapture: a CUDA graph is being captured.
    """

    def __init__(
        self,
        device_group: Any,
        cpu_group: Any,
        *,
        device: torch.device,
        sum_order: str,
        capacity: int = CAPACITY,
        transport: str = "peer",
        timeout_s: float = TIMEOUT_S,
        width: int = 8192,
    ) -> None:
        mailbox = LamportMailbox(
            device_group,
            cpu_group,
            device=device,
            width=width,
            capacity=capacity,
            transport=transport,
            timeout_s=timeout_s,
            terms={"sum_order": sum_order},
        )
        self._share(mailbox, sum_order)

    @classmethod
    def over(cls, mailbox: LamportMailbox, sum_order: str) -> Self:
        """The same over a mailbox that is there already, such as a stand-in's. Raises: ValueError, the order."""
        made = cls.__new__(cls)
        made._share(mailbox, sum_order)
        return made

    def _share(self, mailbox: LamportMailbox, sum_order: str) -> None:
        if sum_order not in SUM_ORDERS:
            raise ValueError(f"sum_order {sum_order!r}; allowed: {', '.join(SUM_ORDERS)}")
        self.mailbox, self.sum_order = mailbox, sum_order
        self._bound: dict[AllReduceDualNormConstants, FusedDualNorm] = {}

    def constants_of(
        self, constants: DualNormConstants, *, published: bool, wait_last: bool = False
    ) -> AllReduceDualNormConstants:
        """The kernel's constants for a boundary over this mailbox.

        Raises:
            ValueError: the boundary has another width than the mailbox, or cannot follow an all-reduce.
        """
        shape = self.mailbox.shape
        if constants.hidden != shape.width:
            raise ValueError(f"the boundary has {constants.hidden} columns and the mailbox {shape.width}")
        return AllReduceDualNormConstants.of(
            constants,
            shape.tp,
            self.sum_order,
            published=published,
            transport=shape.transport,
            capacity=shape.capacity,
            timeout_s=self.mailbox.timeout_s,
            wait_last=wait_last,
        )

    def bind(
        self, constants: DualNormConstants, published: bool = False, *, wait_last: bool = False
    ) -> "FusedDualNorm":
        """The boundary of a layer; layers of equal constants get the same object.

        `published`: the partial sum was published by the kernel before (the GEMM); only consume. `wait_last`: see
        the constants. The kernel is compiled or loaded, and loaded onto the device, here; nothing is launched.

        Raises:
            ValueError: as `constants_of`.
            CompileDuringCapture: a CUDA graph is being captured.
        """
        assert_not_capturing("AllReduceDualNorm")
        wanted = self.constants_of(constants, published=published, wait_last=wait_last)
        if wanted not in self._bound:
            self._bound[wanted] = FusedDualNorm(wanted, self.mailbox)
        return self._bound[wanted]


class FusedDualNorm(DualNorm):
    """A bound boundary: `run` as `DualNorm.run`, but `partial` is this rank's part of the sum.

    With `published` the partial sum is taken from the mailbox, and of `partial` only the number of rows counts. All
    ranks run it with the same number of rows, at most the mailbox's capacity. Beside what `DualNorm.run` raises, it is
    a ValueError to have too many rows, published rows that nobody consumed, or none or another number to consume.
    """

    constants: AllReduceDualNormConstants

    def __init__(self, constants: AllReduceDualNormConstants, mailbox: LamportMailbox) -> None:
        self.mailbox = mailbox
        self.name = f"AllReduceDualNorm ({constants.role})"
        super().__init__(constants, mailbox.device)

    def _launch(self, rows: int, operands: list[torch.Tensor]) -> None:
        self.mailbox.check_rows(rows)
        if self.constants.role == "consume":
            self.mailbox.mark_consumed(rows, self.name)
            del operands[0]
        else:
            self.mailbox.check_free(self.name)
        self.kernel.function(*operands, *self.mailbox.operands)

    def _load(self) -> None:
        """Without a launch, which would be collective."""
        self.kernel.prepare(self.device.index)


class PartialPublisher:
    """Publishes a partial sum from memory, as the GEMM does from its epilogue: for tests of the consumer alone.

    Args:
        constants: of the consumer that follows.
        mailbox: where to.

    Raises:
        CompileDuringCapture: a CUDA graph is being captured.
    """

    def __init__(self, constants: AllReduceDualNormConstants, mailbox: LamportMailbox) -> None:
        assert_not_capturing("PartialPublisher")
        self.mailbox, self.width = mailbox, constants.hidden
        self.kernel = service_for(mailbox.device).get(publisher_of(constants))
        self.kernel.prepare(mailbox.device.index)

    def run(self, partial: torch.Tensor) -> None:
        """partial [rows, width] BF16. Raises: ValueError, as `FusedDualNorm.run`."""
        shape = (partial.shape[0] if partial.dim() else 0, self.width)
        check_operand(partial, shape, torch.bfloat16, 16, "partial", self.mailbox.device)
        if shape[0]:
            self.mailbox.mark_published(shape[0], "PartialPublisher")
            self.kernel.function(partial, *self.mailbox.operands[:2])


def publisher_of(constants: AllReduceDualNormConstants) -> AllReduceDualNormConstants:
    """The constants of the publisher that goes with a consumer."""
    return dataclasses.replace(constants, role="publish", wait_last=False)
