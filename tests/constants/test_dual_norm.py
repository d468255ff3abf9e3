import dataclasses
import itertools

import pytest

from muse_jit.constants.dual_norm import DualNormConstants
from muse_jit.errors import ConstantsError

VALID = {"hidden": 8192, "post_eps": 1e-8, "next_eps": 1e-5}
WEIGHTED = {"post_weight": "before", "post_gain_center": 1.0}
FLASHINFER = {"order": "flashinfer-0.7"}


@pytest.mark.parametrize(
    ("change", "field"),
    [
        ({"hidden": 0}, "hidden"),
        ({"hidden": -8}, "hidden"),
        ({"hidden": 12}, "hidden"),
        ({"hidden": 8200}, "hidden"),
        ({"hidden": True}, "hidden"),
        ({"post_eps": 0.0}, "post_eps"),
        ({"post_eps": 1}, "post_eps"),
        ({"next_eps": float("inf")}, "next_eps"),
        ({"next_eps": -1e-5}, "next_eps"),
        ({"post_weight": "behind"}, "post_weight"),
        ({"post_weight": None}, "post_weight"),
        ({"post_gain_center": 1.0}, "post_gain_center"),
        ({"post_gain_center": -0.0}, "post_gain_center"),
        ({"post_weight": "after", "post_gain_center": float("inf")}, "post_gain_center"),
        ({"gate": "row"}, "gate"),
        ({"alpha": 0.5}, "alpha"),
        ({"alpha_tensor": False, "alpha": float("nan")}, "alpha"),
        ({"alpha_tensor": False, "alpha": 1}, "alpha"),
        ({"next_has_weight": False, "next_weight_before": True}, "next_weight_before"),
        ({"next_has_weight": False, "next_gain_center": 1.0}, "next_gain_center"),
        ({"out_dtype": "half"}, "out_dtype"),
        ({"enable_pdl": False, "release_early": True}, "release_early"),
        ({"order": "triton-9"}, "order"),
        ({"ctas_per_row": 3}, "ctas_per_row"),
        ({"ctas_per_row": 16}, "ctas_per_row"),
        ({"ctas_per_row": 0}, "ctas_per_row"),
        ({"hidden": 1024}, "ctas_per_row"),
        ({**FLASHINFER, "hidden": 4096}, "hidden"),
        ({**FLASHINFER, "post_weight": "after"}, "post_weight"),
        ({**FLASHINFER, "gate": "scalar"}, "gate"),
        ({**FLASHINFER, "next_has_weight": False}, "next_has_weight"),
        ({**FLASHINFER, "next_weight_before": True}, "next_weight_before"),
        ({**FLASHINFER, "out_dtype": "fp32"}, "out_dtype"),
    ],
)
def test_impossible_sets_are_refused_by_field(change, field):
    with pytest.raises(ConstantsError, match=rf"DualNormConstants\.{field} is "):
        DualNormConstants(**{**VALID, **change})


def test_the_next_eps_has_no_default():
    with pytest.raises(TypeError, match="next_eps"):
        DualNormConstants(8192, 1e-8)
    with pytest.raises(ConstantsError, match="needs the field 'next_eps'"):
        DualNormConstants.from_dict({"hidden": 8192, "post_eps": 1e-8})


@pytest.mark.parametrize("change", [{}, WEIGHTED, {**FLASHINFER, **WEIGHTED}, {"alpha_tensor": False, "alpha": 0.5}])
def test_plain_values_and_back(change):
    constants = DualNormConstants(**{**VALID, **change})
    assert DualNormConstants.from_dict(constants.as_dict()) == constants


@pytest.mark.parametrize(
    ("hidden", "possible"), [(8, 1), (256, 1), (264, 2), (512, 2), (1024, 4), (1032, 8), (8192, 8)]
)
def test_each_cta_of_a_row_has_a_warp(hidden, possible):
    for ctas in (1, 2, 4, 8):
        if ctas <= possible:
            threads = DualNormConstants(**{**VALID, "hidden": hidden, "ctas_per_row": ctas}).threads_per_cta
            assert threads >= 32
            assert threads * ctas * 8 >= hidden
        else:
            with pytest.raises(ConstantsError, match=r"ctas_per_row is .*; allowed with hidden="):
                DualNormConstants(**{**VALID, "hidden": hidden, "ctas_per_row": ctas})


def test_every_field_is_documented_in_the_source():
    import ast
    import inspect

    body = ast.parse(inspect.getsource(DualNormConstants)).body[0].body
    documented = {
        before.target.id
        for before, after in itertools.pairwise(body)
        if isinstance(before, ast.AnnAssign) and isinstance(after, ast.Expr) and isinstance(after.value, ast.Constant)
    }
    assert documented >= {f.name for f in dataclasses.fields(DualNormConstants)}
