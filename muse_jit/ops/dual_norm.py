"""DualNorm: a residual boundary on torch tensors, in one kernel."""

import functools

import torch

from muse_jit.constants.dual_norm import DualNormConstants
from muse_jit.ops.device import assert_not_capturing, check_operand, service_for

DTYPES = {"bf16": torch.bfloat16, "fp32": torch.float32}


class DualNorm:
    """Post-norm of a partial sum, gated addition into the residual stream in place, and the next pre-norm.

    stream = alpha * stream + beta * post_norm(partial); out = next_norm(stream).

    Args:
        constants: what the kernel is specialised on.
        device: where it runs; default: the current device.

    The kernel is compiled or loaded, and loaded onto the device, here.

    Raises:
        CompileDuringCapture: a CUDA graph is being captured.
    """

    def __init__(self, constants: DualNormConstants, device: torch.device | None = None) -> None:
        assert_not_capturing("DualNorm")
        self.constants = constants
        self.device = device if device is not None else torch.device("cuda", torch.cuda.current_device())
        self.out_dtype = DTYPES[constants.out_dtype]
        self.kernel = service_for(self.device).get(constants)
        self._gate_shape = (constants.hidden,) if constants.gate == "channel" else (1,)
        self._load()

    def run(
        self,
        partial: torch.Tensor,
        stream: torch.Tensor,
        post_weight: torch.Tensor | None,
        alpha: torch.Tensor | float,
        beta: torch.Tensor,
        next_weight: torch.Tensor | None,
        out: torch.Tensor,
    ) -> None:
        """partial [rows, hidden] BF16; stream [rows, hidden] FP32, updated in place; out [rows, hidden].

        post_weight and next_weight [hidden] BF16 or None; alpha and beta FP32, [hidden] or [1] as the constants say;
        alpha a float, equal to that of the constants, where it is no operand there. All contiguous and on one device;
        BF16 aligned to 16 bytes, FP32 to 32, scalar gates to 4. Zero rows is a no-op.

        Raises:
            ValueError: naming the operand and what it must be.
        """
        c = self.constants
        shape = (partial.shape[0] if partial.dim() else 0, c.hidden)
        check_operand(partial, shape, torch.bfloat16, 16, "partial", self.device)
        check_operand(stream, shape, torch.float32, 32, "stream", self.device)
        check_operand(out, shape, self.out_dtype, 8 * self.out_dtype.itemsize, "out", self.device)
        operands = [partial, stream]
        self._add_weight(operands, post_weight, c.post_weight != "none", "post_weight")
        if isinstance(alpha, torch.Tensor) != c.alpha_tensor:
            raise ValueError(f"alpha must be a {'tensor' if c.alpha_tensor else 'float'} (alpha_tensor)")
        if isinstance(alpha, torch.Tensor):
            self._add_gate(operands, alpha, "alpha")
        elif alpha != c.alpha:
            raise ValueError(f"alpha must be {c.alpha}, which the kernel was built with, not {alpha}")
        self._add_gate(operands, beta, "beta")
        self._add_weight(operands, next_weight, c.next_has_weight, "next_weight")
        if shape[0]:
            self._launch(shape[0], [*operands, out])

    def _launch(self, rows: int, operands: list[torch.Tensor]) -> None:
        """Launch on checked operands, in the kernel's order, of at least one row."""
        self.kernel.function(*operands)

    def _add_weight(self, operands: list[torch.Tensor], weight: torch.Tensor | None, wanted: bool, name: str) -> None:
        if (weight is not None) != wanted:
            raise ValueError(f"{name} must be {'given' if wanted else 'None'}, as the constants say")
        if weight is not None:
            check_operand(weight, (self.constants.hidden,), torch.bfloat16, 16, name, self.device)
            operands.append(weight)

    def _add_gate(self, operands: list[torch.Tensor], gate: torch.Tensor, name: str) -> None:
        alignment = 32 if self.constants.gate == "channel" else 4
        check_operand(gate, self._gate_shape, torch.float32, alignment, name, self.device)
        operands.append(gate)

    def _load(self) -> None:
        """Load the GPU module by one launch on a row of zeros: a module cannot be loaded during a capture."""
        c = self.constants
        weight = torch.zeros(c.hidden, dtype=torch.bfloat16, device=self.device)
        gate = torch.zeros(self._gate_shape, dtype=torch.float32, device=self.device)
        with torch.cuda.device(self.device):
            self.run(
                torch.zeros(1, c.hidden, dtype=torch.bfloat16, device=self.device),
                torch.zeros(1, c.hidden, dtype=torch.float32, device=self.device),
                weight if c.post_weight != "none" else None,
                gate if c.alpha_tensor else c.alpha,
                gate,
                weight if c.next_has_weight else None,
                torch.empty(1, c.hidden, dtype=self.out_dtype, device=self.device),
            )
            torch.cuda.synchronize(self.device)


@functools.cache
def standalone_dual_norm(constants: DualNormConstants) -> DualNorm:
    """The dual norm of a constant set on the current device, made once per process."""
    return DualNorm(constants)
