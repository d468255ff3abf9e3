"""Constants read from a stock norm's attributes, and the order chosen for a Triton version."""

import types

import pytest
import torch

from muse_jit.constants.row_norm import RowNormConstants
from muse_jit.errors import ConstantsError
from muse_jit.ops.stock_layer import row_norm_constants
from muse_jit.ops.stock_order import order_of_triton


def _norm(**changes):
    values = {
        "hidden_size": 8192,
        "variance_epsilon": 1e-5,
        "variance_size_override": None,
        "has_weight": True,
        "weight": torch.zeros(8192, dtype=torch.bfloat16),
        "fused_gain_center": 1.0,
        "gain_center": 1.0,
        "applies_weight_before_norm": False,
    }
    return types.SimpleNamespace(**{**values, **changes})


def _read(norm, **options):
    return row_norm_constants(norm, **{"enable_pdl": True, "x_fp32": False, "order": "triton-3.8", **options})


def test_the_pre_qkv_norm():
    assert _read(_norm(), stream=True, release_early=True) == RowNormConstants(
        hidden=8192, eps=1e-5, has_weight=True, gain_center=1.0, stream=True, release_early=True
    )


def test_a_weightless_norm_ignores_its_bare_gain_center():
    norm = _norm(has_weight=False, weight=None, fused_gain_center=0.0, applies_weight_before_norm=True)
    assert _read(norm) == RowNormConstants(hidden=8192, eps=1e-5, has_weight=False)


def test_weight_dtype_and_place():
    norm = _norm(weight=torch.zeros(8192), applies_weight_before_norm=True)
    assert (_read(norm).weight_dtype, _read(norm).weight_before_norm) == ("fp32", True)
    with pytest.raises(ConstantsError, match="weight_dtype is 'float16'"):
        _read(_norm(weight=torch.zeros(8192, dtype=torch.float16)))


def test_without_pdl_nothing_is_released_early():
    constants = _read(_norm(), enable_pdl=False, release_early=True)
    assert (constants.enable_pdl, constants.release_early) == (False, False)


def test_another_variance_size_is_refused():
    with pytest.raises(ValueError, match="full hidden size, not 4096"):
        _read(_norm(variance_size_override=4096))


@pytest.mark.parametrize(
    ("version", "order", "said"),
    [
        ("3.8.0", "triton-3.8", False),
        ("3.8.1+gitabc", "triton-3.8", False),
        ("3.6.0", "triton-3.6", False),
        ("3.7.0", "triton-3.8", True),
        ("3.5.1", "triton-3.6", True),
        ("3.9.0", "triton-3.8", True),
        ("4.0", "triton-3.8", True),
    ],
)
def test_order_by_triton_version(version, order, said, caplog):
    with caplog.at_level("INFO", "muse_jit"):
        assert order_of_triton(version) == order
    assert ("bits may differ" in caplog.text) == said
