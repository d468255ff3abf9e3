"""RowNorm: the row norm kernel of one constant set on torch tensors."""

import torch

from muse_jit.constants.row_norm import RowNormConstants
from muse_jit.ops.device import assert_not_capturing, check_operand, service_for

DTYPES = {"bf16": torch.bfloat16, "fp32": torch.float32}
VECTOR = 8
"""Elements one thread moves together: 16 bytes of BF16, 32 of FP32. Operands are aligned to them."""


class RowNorm:
    """out = norm(x) by rows, and x in FP32 into the stream and the auxiliary state where the constants ask for it.

    Args:
        constants: what the kernel is specialised on.
        weight: contiguous [hidden] of the constants' weight dtype, or None without a weight. It is kept.
        device: where the kernel runs; default: that of the weight, without a weight the current device.

    The kernel is compiled or loaded, and loaded onto the device, here.

    Raises:
        ValueError: the weight is not what the constants say.
        CompileDuringCapture: a CUDA graph is being captured.
    """

    def __init__(
        self, constants: RowNormConstants, weight: torch.Tensor | None, device: torch.device | None = None
    ) -> None:
        assert_not_capturing("RowNorm")
        if (weight is not None) != constants.has_weight:
            raise ValueError(f"weight must be {'given' if constants.has_weight else 'None'} (has_weight)")
        if device is None:
            device = weight.device if weight is not None else torch.device("cuda", torch.cuda.current_device())
        if weight is not None:
            dtype = DTYPES[constants.weight_dtype]
            check_operand(weight, (constants.hidden,), dtype, VECTOR * dtype.itemsize, "weight", device)
        self.constants, self.weight, self.device = constants, weight, device
        self._weights = () if weight is None else (weight,)
        self.x_dtype = DTYPES["fp32" if constants.x_fp32 else "bf16"]
        self.out_dtype = DTYPES[constants.out_dtype]
        self.kernel = service_for(device).get(constants)
        self._load()

    def launch(
        self,
        x: torch.Tensor,
        out: torch.Tensor,
        rows: int,
        stream: torch.Tensor | None = None,
        aux: torch.Tensor | None = None,
    ) -> None:
        """Launch on the first `rows` rows, on the caller's current stream. Operands are not checked; see `check`.

        x [>= rows, hidden] BF16 or FP32, out [>= rows, hidden], stream and aux [>= rows, hidden] FP32 exactly where
        the constants ask for them. Zero rows is a no-op.
        """
        if rows == 0:
            return
        copies = [t[:rows] for t in (stream, aux) if t is not None]
        self.kernel.function(x[:rows], *self._weights, out[:rows], *copies)

    def check(
        self,
        x: torch.Tensor,
        out: torch.Tensor,
        rows: int,
        stream: torch.Tensor | None = None,
        aux: torch.Tensor | None = None,
    ) -> None:
        """Check the operands of a launch.

        Raises:
            ValueError: naming the operand and what it must be.
        """
        shape = (rows, self.constants.hidden)
        for tensor, dtype, name in ((x, self.x_dtype, "x"), (out, self.out_dtype, "out")):
            check_operand(tensor, shape, dtype, VECTOR * dtype.itemsize, name, self.device)
        for copy, wanted, name in ((stream, self.constants.stream, "stream"), (aux, self.constants.aux, "aux")):
            if (copy is not None) != wanted:
                raise ValueError(f"{name} must be {'given' if wanted else 'None'} ({name}={wanted} in the constants)")
            if copy is not None:
                check_operand(copy, shape, torch.float32, VECTOR * 4, name, self.device)

    def _load(self) -> None:
        """Load the GPU module by one launch on a row of zeros: a module cannot be loaded during a capture."""
        shape = (1, self.constants.hidden)
        with torch.cuda.device(self.device):
            x = torch.zeros(shape, dtype=self.x_dtype, device=self.device)
            out = torch.empty(shape, dtype=self.out_dtype, device=self.device)
            copies = [
                torch.empty(shape, dtype=torch.float32, device=self.device) if wanted else None
                for wanted in (self.constants.stream, self.constants.aux)
            ]
            self.launch(x, out, 1, *copies)
            torch.cuda.synchronize(self.device)
