"""LayerFront: the input of the first decoder layer as one kernel."""

from typing import Any

import torch

from muse_jit.ops.device import assert_not_capturing, pdl_supported
from muse_jit.ops.row_norm import RowNorm
from muse_jit.ops.stock_layer import row_norm_constants


class LayerFront:
    """What the stock forward does with the embedded tokens before the first QKV projection, bit for bit.

    `run(x, stream, out, aux)` writes stream = x in FP32, aux = stream (where built with it), and out = norm(stream) in
    BF16, for x in BF16 (the omni class's embedding) or FP32 (the text class's). Both kernels are ready when the object
    is made. With PDL the kernel releases its dependents right after its own wait: whoever follows waits for this grid
    before reading.

    Args:
        norm: the layer's pre_qkv_proj_norm; its attributes are read (see `row_norm_constants`), its weight is kept.
        aux: whether layer 0 is tapped for an auxiliary hidden state.
        order: order of operations; default, what stock would run in this process.
        device: default, that of the norm's weight, without a weight the current device.
    """

    INPUT_DTYPES = (torch.bfloat16, torch.float32)

    def __init__(self, norm: Any, *, aux: bool, order: str | None = None, device: torch.device | None = None) -> None:
        assert_not_capturing("LayerFront")
        weight = norm.weight if norm.has_weight else None
        if device is None and weight is not None:
            device = weight.device
        self.aux = aux
        self.enable_pdl = pdl_supported(device)
        self.norms = {
            dtype: RowNorm(
                row_norm_constants(
                    norm,
                    enable_pdl=self.enable_pdl,
                    x_fp32=dtype == torch.float32,
                    stream=True,
                    aux=aux,
                    release_early=True,
                    order=order,
                ),
                weight,
                device,
            )
            for dtype in self.INPUT_DTYPES
        }
        self.hidden = self.norms[torch.bfloat16].constants.hidden

    @classmethod
    def build(cls, ctx: Any, layer: Any, rows: int) -> "LayerFront":
        """From a stock decoder layer, warmed up at `rows` rows; of `ctx`, aux_layers and device are read."""
        front = cls(layer.self_attn.pre_qkv_proj_norm, aux=layer.layer_idx in ctx.aux_layers)
        front.warm_up(ctx.device, rows)
        return front

    def warm_up(self, device: torch.device, rows: int) -> None:
        """Run both input dtypes' kernels once at `rows` rows, before CUDA graph capture, and wait for them."""
        stream = torch.empty(rows, self.hidden, dtype=torch.float32, device=device)
        out = torch.empty(rows, self.hidden, dtype=torch.bfloat16, device=device)
        aux = torch.empty_like(stream) if self.aux else None
        for dtype in self.INPUT_DTYPES:
            self.run(torch.zeros(rows, self.hidden, dtype=dtype, device=device), stream, out, aux)
        torch.accelerator.synchronize(device)

    def run(self, x: torch.Tensor, stream: torch.Tensor, out: torch.Tensor, aux: torch.Tensor | None = None) -> None:
        """x [rows, hidden] BF16 or FP32; stream [rows, hidden] FP32; out [rows, hidden] BF16; aux as stream.

        All contiguous, BF16 aligned to 16 bytes and FP32 to 32. Zero rows is a no-op.

        Raises:
            ValueError: naming the operand and what it must be.
        """
        norm = self.norms.get(x.dtype)
        if norm is None:
            raise ValueError(f"x must be torch.bfloat16 or torch.float32, not {x.dtype}")
        rows = x.shape[0] if x.dim() else 0
        norm.check(x, out, rows, stream, aux)
        norm.launch(x, out, rows, stream, aux)
