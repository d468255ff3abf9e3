"""Stock's all-reduces on torch tensors, in their order of operations: `oracle.all_reduce` for GPUs."""

import torch

TINY = torch.finfo(torch.float32).tiny


def flushed(x):
    """Subnormals as zeros of their sign. torch's own additions keep them; stock's are compiled to flush."""
    return torch.where(x.abs() < TINY, torch.copysign(torch.zeros_like(x), x), x)


def add_flushed(a, b):
    return flushed(flushed(a) + flushed(b))


def canonical(x):
    """BF16 as it is published: -0 is +0."""
    bits = x.view(torch.int16)
    return torch.where(bits == -32768, torch.zeros_like(bits), bits).view(torch.bfloat16)


def stock_sum(partials, order):
    """The sum of BF16 tensors over the ranks; see `oracle.all_reduce.all_reduce`."""
    values = [canonical(p).float() for p in partials]
    if order == "node-local":
        total = values[0]
        for value in values[1:]:
            total = add_flushed(total, value).bfloat16().float()
        return total.bfloat16()
    sums = []
    for first in range(0, len(values), 8):
        total = torch.zeros_like(values[0])
        for value in values[first : first + 8]:
            total = add_flushed(total, value)
        sums.append(total)
    return (sums[0] if len(sums) == 1 else add_flushed(*sums)).bfloat16()
