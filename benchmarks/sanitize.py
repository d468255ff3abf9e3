"""One launch of every kernel that Muse Spark is served with, small enough for compute-sanitizer.

    PYTORCH_NO_CUDA_MEMORY_CACHING=1 \
    compute-sanitizer --tool memcheck|racecheck|synccheck python benchmarks/sanitize.py [norms] [gemm]

Without torch's cache each operand is an allocation of its own, so that memcheck sees a byte beyond it.
The norms and the small-M GEMM, or one of them. Norms:
Rows are chosen so that every kernel of a library runs: a row spread over four CTAs, over two, and one CTA a row; every
warp telling every CTA, and CTAs adding up their own warps. Results are compared with the order's emulation on the CPU,
so that a run in which nothing happened is seen.

The GEMM: every shape of the table and every one that Muse Spark's sizes get; a full bucket, one row, and an odd number
of rows, whose last tile is not full. Results are compared with float64.
"""

import pathlib
import sys

import numpy as np
import torch

sys.path[:0] = [str(pathlib.Path(__file__).resolve().parents[1] / "tests")]

from oracle import dual, norms
from support.rows import rows_of, same_bits
from support.stock_sum import stock_sum

sys.path[:0] = [str(pathlib.Path(__file__).resolve().parents[1] / "tests" / "gpu")]
import cases

ROWS = (1, 30, 40, 65)


def rsqrt(a):
    return torch.rsqrt(torch.from_numpy(np.ascontiguousarray(a)).cuda()).cpu().numpy()


def front(x_fp32):
    from muse_jit.ops.row_norm import RowNorm

    constants = next(c for c in cases.front_sets() if c.x_fp32 == x_fp32 and not c.aux and c.order == "triton-3.8")
    weight = (torch.randn(8192, device="cuda") * 0.2).bfloat16()
    norm = RowNorm(constants, weight)
    for rows in ROWS:
        x = rows_of("normal", rows, 8192, norm.x_dtype, rows)
        out, stream = torch.empty_like(x, dtype=torch.bfloat16), torch.empty_like(x, dtype=torch.float32)
        norm.launch(x, out, rows, stream)
        expected, _, _ = norms.row_norm(
            x.float().cpu().numpy()[:2], weight.float().cpu().numpy(), constants, "sm_90a", rsqrt
        )
        assert same_bits(out[:2].float().cpu(), torch.from_numpy(expected)) == 0
        assert same_bits(stream, x.float()) == 0


def boundary(constants):
    from muse_jit.ops.dual_norm import DualNorm

    norm = DualNorm(constants)
    post, following = ((torch.randn(8192, device="cuda") * 0.2).bfloat16() for _ in range(2))
    alpha, beta = (torch.rand(8192, device="cuda") for _ in range(2))
    parameters = (post if constants.post_weight != "none" else None, alpha, beta, following)
    for rows in ROWS:
        partial = rows_of("normal", rows, 8192, torch.bfloat16, rows)
        stream = rows_of("normal", rows, 8192, torch.float32, rows + 100)
        new, out = stream.clone(), torch.empty_like(partial)
        norm.run(partial, new, *parameters, out)
        arrays = [None if p is None else p.float().cpu().numpy() for p in parameters]
        expected = dual.dual_norm(
            partial[:2].float().cpu().numpy(), stream[:2].cpu().numpy(), *arrays, constants, "sm_90a", rsqrt
        )
        for got, wanted in zip((new, out), expected, strict=True):
            assert same_bits(got[:2].float().cpu(), torch.from_numpy(wanted)) == 0


def fused(tp, order):
    """All ranks on this GPU: each publishes, then each consumes."""
    from muse_jit.ops.all_reduce_dual_norm import AllReduceDualNorm, PartialPublisher
    from muse_jit.ops.dual_norm import DualNorm
    from muse_jit.ops.lamport_mailbox import LamportMailbox

    device = torch.device("cuda", torch.cuda.current_device())
    boxes = LamportMailbox.stand_in(tp, device, timeout_s=cases.FUSED_TIMEOUT_S)
    bound = [AllReduceDualNorm.over(box, order).bind(cases.BOUNDARY, published=True) for box in boxes]
    publishers = [PartialPublisher(bound[0].constants, box) for box in boxes]
    alpha, beta = (torch.rand(8192, device="cuda") for _ in range(2))
    weight = (torch.randn(8192, device="cuda") * 0.2).bfloat16()
    for rows in (1, 30, 64, 2):
        partials = [rows_of("normal", rows, 8192, torch.bfloat16, 10 * rows + p) for p in range(tp)]
        stream = rows_of("normal", rows, 8192, torch.float32, rows + 100)
        for publisher, partial in zip(publishers, partials, strict=True):
            publisher.run(partial)
        expected, wanted = stream.clone(), torch.empty_like(partials[0])
        DualNorm(cases.BOUNDARY).run(stock_sum(partials, order), expected, None, alpha, beta, weight, wanted)
        for norm, partial in zip(bound, partials, strict=True):
            new, out = stream.clone(), torch.empty_like(partial)
            norm.run(partial, new, None, alpha, beta, weight, out)
            assert same_bits(new, expected) == same_bits(out, wanted) == 0
    for box in boxes:
        box.check()


def gemm(constants):
    from muse_jit.ops.device import service_for

    weight = (torch.randn(constants.n, constants.k, device="cuda") * constants.k**-0.5).bfloat16()
    kernel = service_for(weight.device).get(constants)
    for rows in sorted({1, constants.rows - 3, constants.rows}):
        x = torch.randn(rows, constants.k, device="cuda").bfloat16()
        out = torch.full((rows, constants.n), float("nan"), dtype=torch.bfloat16, device="cuda")
        kernel(x, weight, out)
        exact = x.double() @ weight.double().t()
        # A rounding to BF16 is half of 2**-8 of a result; sums in FP32 are off by far less.
        assert bool(((out.double() - exact).abs() <= exact.abs() * 2**-8 + 1e-4).all()), constants


def norms_and_boundaries():
    count = 0
    for tp in (2, 8):
        for order in ("mnnvl", "node-local"):
            fused(tp, order)
            count += 1
    for x_fp32 in (False, True):
        front(x_fp32)
        count += 1
    for constants in cases.boundary_sets():
        if constants.enable_pdl:
            boundary(constants)
            count += 1
    return count


def main():
    wanted = sys.argv[1:] or ["norms", "gemm"]
    if not set(wanted) <= {"norms", "gemm"}:
        sys.exit(f"{' '.join(wanted)}: name norms, gemm, or nothing for both")
    if "norms" in wanted:
        print(f"{norms_and_boundaries()} constant sets, rows {ROWS}: results as emulated")
    if "gemm" in wanted:
        shapes = list(dict.fromkeys(cases.shipped_gemms()))
        for constants in shapes:
            gemm(constants)
        print(f"{len(shapes)} constant sets of the GEMM: results as in float64")
    torch.cuda.synchronize()


if __name__ == "__main__":
    main()
