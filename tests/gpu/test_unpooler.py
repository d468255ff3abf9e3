"""The Unpooler on a device: the right kernel for every row count, refusals, capture, and behind a norm by PDL."""

import pathlib
import sys

import pytest
import torch
from support.gemm_operands import errors, operands, same

sys.path.insert(0, str(pathlib.Path(__file__).parent))
import cases

from muse_jit.constants.gemm_shapes import BUCKETS, OPROJ
from muse_jit.errors import CompileDuringCapture
from muse_jit.ops.o_projection import OProjection
from muse_jit.ops.row_norm import RowNorm
from muse_jit.ops.unpooler import Unpooler

pytestmark = pytest.mark.gpu

N, K = 8192, 1024


def _poisoned(rows, n=N):
    return torch.full((rows, n), float("nan"), dtype=torch.bfloat16, device="cuda")


@pytest.fixture(scope="module")
def gemm():
    return Unpooler(operands(N, K, 1)[1], None, OPROJ)


def _operands(rows):
    return {"x": operands(N, K, rows, seed=rows)[0], "out": _poisoned(rows)}


@pytest.mark.parametrize(("n", "k"), cases.GEMM_SIZES)
def test_every_row_count_gets_the_result_of_its_bucket(n, k):
    x, weight = operands(n, k, 64)
    gemm = Unpooler(weight)
    single = {bucket: Unpooler(weight, rows=(bucket,)) for bucket in BUCKETS}
    for rows in range(1, 65):
        out = _poisoned(rows, n)
        assert gemm.run(x[:rows], out) is out
        mine, theirs = errors(out, x[:rows], weight), errors(torch.mm(x[:rows], weight.t()), x[:rows], weight)
        assert mine.mean() <= theirs.mean() * 1.05
        bucket = next(b for b in BUCKETS if rows <= b)
        assert same(out, single[bucket].run(x[:rows], _poisoned(rows, n)))


def test_o_proj_with_the_packages_gemm_is_the_unpooler_and_without_is_torch_mm(gemm):
    packaged = OProjection(gemm.weight, package_gemm=True)
    plain = OProjection(gemm.weight)
    for rows in (1, 2, 8, 9, 33, 64):
        x = _operands(rows)["x"]
        assert same(packaged.run(x, _poisoned(rows)), gemm.run(x, _poisoned(rows)))
        assert same(plain.run(x, _poisoned(rows)), torch.mm(x, gemm.weight.t()))


def test_zero_rows_are_a_no_op(gemm):
    memory = _poisoned(4)
    out = memory[2:2]
    assert gemm.run(torch.empty(0, K, dtype=torch.bfloat16, device="cuda"), out) is out
    torch.cuda.synchronize()
    assert bool(memory.isnan().all())


def _shifted(tensor):
    memory = torch.empty(tensor.numel() + 1, dtype=tensor.dtype, device="cuda")
    return memory[1:].view(tensor.shape)


@pytest.mark.parametrize("operand", ["x", "out"])
@pytest.mark.parametrize("fault", ["dtype", "shape", "rank", "strides", "alignment", "device"])
def test_wrong_operands_are_named(gemm, operand, fault):
    values = _operands(4)
    good = values[operand]
    values[operand] = {
        "dtype": lambda: good.half(),
        "shape": lambda: good[:, : good.shape[1] // 2].contiguous(),
        "rank": lambda: good.view(-1),
        "strides": lambda: torch.stack([good, good], dim=-1)[..., 0],
        "alignment": lambda: _shifted(good),
        "device": lambda: good.cpu(),
    }[fault]()
    with pytest.raises(ValueError, match=rf"^{operand} must"):
        gemm.run(**values)


def test_more_rows_than_were_built_are_refused(gemm):
    with pytest.raises(ValueError, match=r"^x must have at most the 64 rows"):
        gemm.run(**_operands(65))
    few = Unpooler(gemm.weight, None, OPROJ, rows=(1, 2))
    few.run(**_operands(8))
    with pytest.raises(ValueError, match=r"^x must have at most the 8 rows"):
        few.run(**_operands(9))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda w: w.float(), "^weight must be torch.bfloat16"),
        (lambda w: w.t(), "^weight must be contiguous"),
        (lambda w: w[0], "^weight must be a matrix"),
        (lambda w: w.cpu(), "^weight must be on a CUDA device"),
        (_shifted, "^weight must be aligned to 16 bytes"),
        (lambda w: w[:-8], "^n is 8184; "),
        (lambda w: w[:, :1000].contiguous(), "^k is 1000; "),
    ],
)
def test_wrong_weights_are_refused(gemm, change, message):
    with pytest.raises(ValueError, match=message):
        Unpooler(change(gemm.weight))


def test_a_parameter_is_kept_and_needs_no_copy(gemm):
    weight = torch.nn.Parameter(gemm.weight.clone())
    before = torch.cuda.memory_allocated()
    mine = Unpooler(weight, None, OPROJ)
    assert torch.cuda.memory_allocated() == before
    assert mine.weight is weight
    values = _operands(3)
    expected = gemm.run(**values).clone()
    assert same(mine.run(values["x"], _poisoned(3)), expected)


def test_its_first_launch_may_be_in_a_capture_and_it_allocates_nothing():
    weight = operands(N, K, 1, seed=9)[1]
    gemm = Unpooler(weight, None, OPROJ)
    batches = [operands(N, K, rows, seed=rows)[0] for rows in (1, 8, 9, 17, 33, 64)]
    outs = [_poisoned(x.shape[0]) for x in batches]
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        before = torch.cuda.memory_stats()["allocation.all.allocated"]
        for x, out in zip(batches, outs, strict=True):
            gemm.run(x, out)
        assert torch.cuda.memory_stats()["allocation.all.allocated"] == before
        with pytest.raises(CompileDuringCapture, match="Unpooler is being made"):
            Unpooler(weight)
    for _ in range(3):
        for out in outs:
            out.fill_(float("nan"))
        graph.replay()
        torch.cuda.synchronize()
        for x, out in zip(batches, outs, strict=True):
            assert same(out, gemm.run(x, _poisoned(x.shape[0])))


def test_behind_a_norm_by_dependent_launch_it_reads_what_the_norm_wrote(gemm):
    """The GEMM is launched while the norm runs, and the next norm writes into the memory that the GEMM reads."""
    rows, steps = 8, 40
    norm = RowNorm(cases.CHAIN_NORM, (torch.randn(K, device="cuda") * 0.2).bfloat16())
    inputs = [torch.randn(rows, K, device="cuda").bfloat16() for _ in range(steps)]
    y, stream = _poisoned(rows, K), torch.empty(rows, K, device="cuda")
    expected = []
    for x in inputs:
        norm.launch(x, y, rows, stream)
        torch.cuda.synchronize()
        expected.append(gemm.run(y, _poisoned(rows)))
        torch.cuda.synchronize()
    outs = [_poisoned(rows) for _ in range(steps)]
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for x, out in zip(inputs, outs, strict=True):
            norm.launch(x, y, rows, stream)
            gemm.run(y, out)
    for _ in range(20):
        for out in outs:
            out.fill_(float("nan"))
        graph.replay()
        torch.cuda.synchronize()
        assert all(same(out, wanted) for out, wanted in zip(outs, expected, strict=True))
