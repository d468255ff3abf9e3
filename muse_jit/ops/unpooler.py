"""Unpooler: the package's small-M GEMM on torch tensors, for the few rows of a decode step."""

from collections.abc import Sequence
from typing import Any

import torch

from muse_jit.constants.gemm_shapes import OPROJ, UNPOOLER, ByRows, gemm_constants
from muse_jit.constants.small_m_gemm import GemmShape
from muse_jit.ops.device import assert_not_capturing, check_operand, pdl_supported, service_for
from muse_jit.ops.lamport_mailbox import LamportMailbox
from muse_jit.plan import ROWS
from muse_jit.service import JitService

__all__ = ["OPROJ", "UNPOOLER", "Unpooler"]


class Unpooler:
    """out = x @ weight.T, weight [N, K], sums in FP32: deterministic, but not in cuBLAS's order.

    A row of out depends on that row of x and on the weight alone, whatever the other rows hold; how many rows there are
    may change its last bit, since each bucket of rows has a launch shape of its own.

    Args:
        weight: contiguous BF16 [N, K] on a CUDA device, aligned to 16 bytes; N a multiple of 16, K of 32. It is kept,
            not copied, and read before the previous kernel has finished: nothing on the stream may be writing it.
        mailbox: None, or the LamportMailbox, as wide as N, into which the result is published, too: into this rank's
            slot of every rank. The boundary that consumes it must be the next to use the mailbox.
        shape: OPROJ or UNPOOLER, the tuned launch shape of each bucket of rows for this N and K (an untuned one where
            there is none); or one GemmShape for all buckets.
        rows: row counts to be ready for, from 1 to 64. A launch takes the smallest bucket that was built for them.

    The kernels are compiled or loaded, and loaded onto the device, here, without a launch.

    Raises:
        ValueError: naming the operand, the row count, or what of the shape is not possible for this N and K.
        CompileDuringCapture: a CUDA graph is being captured.
    """

    def __init__(
        self,
        weight: torch.Tensor,
        mailbox: LamportMailbox | None = None,
        shape: ByRows | GemmShape = UNPOOLER,
        rows: Sequence[int] = ROWS,
    ) -> None:
        assert_not_capturing("Unpooler")
        if weight.dim() != 2:
            raise ValueError(f"weight must be a matrix [N, K], not of the shape {tuple(weight.shape)}")
        check_operand(weight, tuple(weight.shape), torch.bfloat16, 16, "weight")
        service, ordinal, pdl = _place(weight.device)
        if mailbox is not None and mailbox.device != weight.device:
            raise ValueError(f"the mailbox is on {mailbox.device}, the weight on {weight.device}")
        place = None if mailbox is None else mailbox.shape
        self._operands = () if mailbox is None else mailbox.operands[:2]
        self.weight, self.mailbox, self.shape = weight, mailbox, shape
        self.n, self.k = weight.shape
        self.constants = gemm_constants(self.n, self.k, rows, service.target.arch, pdl=pdl, shape=shape, mailbox=place)
        self.max_rows = self.constants[-1].rows
        if not all(map(service.in_memory, self.constants)):  # every layer but the first finds them there
            service.ensure(self.constants)
        self._weight = weight.detach()  # the same memory: a tensor that requires grad is no operand
        self._functions: list[Any] = [None]
        for constants in self.constants:
            kernel = service.get(constants)
            kernel.prepare(ordinal)
            self._functions += [kernel.function] * (constants.rows + 1 - len(self._functions))

    def run(self, x: torch.Tensor, out: torch.Tensor) -> torch.Tensor:
        """x [b, K] to out [b, N], both BF16, contiguous, aligned to 16 bytes and on the weight's device; returns `out`.

        b is at most the largest bucket built; zero rows is a no-op, which publishes nothing. On the caller's current
        stream; allocates nothing and can be captured.

        Raises:
            ValueError: naming the operand and what it must be, or what was published and not consumed.
        """
        rows = x.shape[0] if x.dim() else 0
        check_operand(x, (rows, self.k), torch.bfloat16, 16, "x", self.weight.device)
        check_operand(out, (rows, self.n), torch.bfloat16, 16, "out", self.weight.device)
        if rows > self.max_rows:
            raise ValueError(f"x must have at most the {self.max_rows} rows that this object was built for, not {rows}")
        if rows:
            if self.mailbox is not None:
                self.mailbox.mark_published(rows, "Unpooler")
            self._functions[rows](x, self._weight, out, *self._operands)
        return out


def _place(device: torch.device) -> tuple[JitService, int, bool]:
    """A CUDA device's kernel service and ordinal, and whether its kernels are launched dependently."""
    if device.type != "cuda":
        raise ValueError(f"weight must be on a CUDA device, not on {device}")
    ordinal = device.index if device.index is not None else torch.cuda.current_device()
    return service_for(device), ordinal, pdl_supported(device)
