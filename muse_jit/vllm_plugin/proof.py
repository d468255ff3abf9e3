"""Stock against ours on this GPU, bit for bit, before anything is replaced.

The order of operations was chosen by the versions installed; that it is right is seen here, on some random rows and
the model's own weights, in milliseconds. A wrong order differs in the last bit of some sums, and only a few of these
reach a BF16 result: a version whose order is not known is left to stock before it comes to this.
"""

from typing import Any

import torch

from muse_jit.ops.attention_boundary import AttentionBoundary
from muse_jit.ops.layer_front import LayerFront

ROWS = (1, 7, *[64] * 16)
"""Rows of each comparison; each has other numbers. Another Triton's row norm differs in one element of 64 rows or so,
which is why there are a thousand."""


def front_differs(front: LayerFront, norm: Any, device: torch.device) -> str | None:
    """What of the first layer's front is not as stock's conversion and norm write it; None where all bits are."""
    for dtype in front.INPUT_DTYPES:
        for seed, rows in enumerate(ROWS):
            x = _rows(rows, front.hidden, device, seed=seed).to(dtype)
            expected_stream = x.to(torch.float32)
            expected = norm(expected_stream, out_dtype=torch.bfloat16)
            stream, out = torch.empty_like(expected_stream), torch.empty_like(expected)
            front.run(x, stream, out)
            count = _differ(stream, expected_stream) + _differ(out, expected)
            if count:
                return f"{count} elements of {rows} rows of {dtype} differ from stock"
    return None


def boundary_differs(
    boundary: AttentionBoundary, layer: Any, stock: Any, stream_class: type, device: torch.device
) -> str | None:
    """The same for an attention boundary after the all-reduce, against the stock function `stock`."""
    for seed, rows in enumerate(ROWS):
        width = layer.pre_ffn_norm.hidden_size
        branch = _rows(rows, width, device, seed=seed).to(torch.bfloat16)
        stream = _rows(rows, width, device, seed=100 + seed)
        x = stream_class(
            stream=stream.clone(), branch=branch, post_norm=layer.post_attn_norm, connection=layer.add_attn
        )
        expected, expected_stream = stock(x, layer.pre_ffn_norm, out_dtype=torch.bfloat16, router_input=None)
        out = torch.empty_like(branch)
        boundary.op.run(branch, stream, boundary.post_weight, boundary.alpha, boundary.beta, boundary.next_weight, out)
        count = _differ(stream, expected_stream) + _differ(out, expected)
        if count:
            return f"{count} elements of {rows} rows differ from stock"
    return None


def _rows(rows: int, width: int, device: torch.device, *, seed: int) -> torch.Tensor:
    """Random FP32 rows, each of another magnitude, by a generator of its own: the model's stays untouched."""
    generator = torch.Generator(device=device).manual_seed(seed)
    scale = torch.logspace(-2, 2, rows, device=device).unsqueeze(1)
    return torch.randn(rows, width, generator=generator, device=device) * scale


def _differ(a: torch.Tensor, b: torch.Tensor) -> int:
    """Elements whose bits differ; all of them where shape or dtype do."""
    if a.dtype != b.dtype or a.shape != b.shape:
        return a.numel()
    integers = {2: torch.int16, 4: torch.int32}[a.element_size()]
    return int((a.view(integers) != b.view(integers)).sum())
