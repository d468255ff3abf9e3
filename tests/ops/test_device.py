import pytest
import torch

from muse_jit.ops.device import assert_not_capturing, check_operand


def _check(tensor, **changes):
    values = {"shape": (4, 8), "dtype": torch.float32, "alignment": 32, "name": "stream", **changes}
    check_operand(
        tensor, values.pop("shape"), values.pop("dtype"), values.pop("alignment"), values.pop("name"), **values
    )


@pytest.mark.parametrize(
    ("tensor", "words"),
    [
        (torch.zeros(4, 8, dtype=torch.bfloat16), "must be torch.float32, not torch.bfloat16"),
        (torch.zeros(4, 9), r"must have the shape \(4, 8\), not \(4, 9\)"),
        (torch.zeros(4, 8, 1), r"must have the shape \(4, 8\), not \(4, 8, 1\)"),
        (torch.zeros(8, 4).t(), r"must be contiguous, not with the strides \(1, 4\)"),
        (torch.zeros(36)[1:33].view(4, 8), "must be aligned to 32 bytes"),
    ],
)
def test_each_fault_names_the_operand(tensor, words):
    with pytest.raises(ValueError, match=f"^stream {words}"):
        _check(tensor)


def test_another_device_is_named():
    with pytest.raises(ValueError, match=r"^stream must be on cuda:1, not on cpu"):
        _check(torch.zeros(4, 8), device=torch.device("cuda", 1), alignment=1)


def test_a_right_operand_passes():
    _check(torch.zeros(4, 8), device=torch.device("cpu"), alignment=4)


def test_without_cuda_nothing_is_captured():
    if torch.cuda.is_available():
        pytest.skip("there is a CUDA device here")
    assert assert_not_capturing("x") is None
