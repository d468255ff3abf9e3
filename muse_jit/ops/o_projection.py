"""OProjection: this rank's part of the attention's output projection, before the all-reduce."""

import logging
from collections.abc import Sequence
from typing import Any

import torch

from muse_jit.ops.attention_boundary import producer_mailbox
from muse_jit.ops.context import H
from muse_jit.ops.device import assert_not_capturing, check_operand
from muse_jit.ops.lamport_mailbox import LamportMailbox
from muse_jit.ops.unpooler import OPROJ, Unpooler
from muse_jit.plan import ROWS

logger = logging.getLogger("muse_jit")


class OProjection:
    """partial = x @ weight.T, the row-parallel o_proj without its all-reduce.

    Without a mailbox it is torch.mm into `out`: cuBLAS, as stock's o_proj, bit for bit. With one (the fused attention
    boundary's) it is the package's GEMM, which also publishes the partial sum into this rank's slot: not bit for bit,
    and the boundary that was bound with `published` must run next. `package_gemm` is that GEMM without a mailbox, for
    tests and benchmarks.

    Args:
        weight: contiguous BF16 [8192, K], K = 8192 / TP. It is kept, not copied.
        rows: row counts to be ready for; each is run once here, so that cuBLAS has its workspace before a capture.
        mailbox: where to publish, or None.
        package_gemm: take the package's GEMM although there is no mailbox.

    Raises:
        ValueError: the weight is not what is said above, or the package's GEMM cannot have it or so many rows.
        CompileDuringCapture: a CUDA graph is being captured.
    """

    def __init__(
        self,
        weight: torch.Tensor,
        rows: Sequence[int] = ROWS,
        mailbox: LamportMailbox | None = None,
        *,
        package_gemm: bool = False,
    ) -> None:
        assert_not_capturing("OProjection")
        if weight.dtype != torch.bfloat16 or weight.dim() != 2:
            raise ValueError(f"the o_proj weight must be a BF16 matrix, not {weight.dtype} {tuple(weight.shape)}")
        if weight.shape[0] != H or not weight.is_contiguous():
            raise ValueError(f"the o_proj weight must be a contiguous [{H}, K], not {tuple(weight.shape)}")
        self.weight = weight
        self.inputs = weight.shape[1]
        self.gemm: Unpooler | None = None
        if mailbox is not None or package_gemm:
            self.gemm = Unpooler(weight, mailbox, shape=OPROJ, rows=rows)
            return
        for count in rows:
            self.run(weight.new_zeros(count, self.inputs), weight.new_empty(count, H))

    @classmethod
    def build(cls, ctx: Any, layer: Any, *, rows: Sequence[int] = ROWS) -> "OProjection":
        """From a stock decoder layer's o_proj, publishing where the model's fused boundary takes it from there.

        Raises:
            RuntimeError: o_proj is quantised or has a bias.
            ValueError: its weight is not a contiguous BF16 [8192, K].
        """
        o_proj = layer.self_attn.o_proj
        method = getattr(o_proj, "quant_method", None)
        if all(kind.__name__ != "UnquantizedLinearMethod" for kind in type(method).__mro__):
            raise RuntimeError(f"o_proj must not be quantised; its method is {type(method).__name__}")
        if getattr(o_proj, "bias", None) is not None:
            raise RuntimeError("o_proj must not have a bias")
        mailbox = producer_mailbox(ctx)
        projection = cls(o_proj.weight, rows, mailbox)
        if mailbox is not None and layer.layer_idx == 0:
            logger.info("o_proj at TP%d: package GEMM, partial sums published into the boundary's mailbox", ctx.tp)
        return projection

    def run(self, x: torch.Tensor, out: torch.Tensor) -> torch.Tensor:
        """x [rows, K] BF16 to out [rows, 8192] BF16, contiguous, on the weight's device; returns `out`.

        Zero rows is a no-op. Allocates nothing; can be captured.

        Raises:
            ValueError: naming the operand and what it must be.
        """
        rows = x.shape[0] if x.dim() else 0
        check_operand(x, (rows, self.inputs), torch.bfloat16, 16, "x", self.weight.device)
        check_operand(out, (rows, H), torch.bfloat16, 16, "out", self.weight.device)
        if rows == 0:
            return out
        if self.gemm is not None:
            self.gemm.run(x, out)
            return out
        return torch.mm(x, self.weight.t(), out=out)
