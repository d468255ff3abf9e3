import dataclasses

import pytest

from muse_jit.constants.row_norm import RowNormConstants
from muse_jit.errors import ConstantsError

VALID = {"hidden": 8192, "eps": 1e-5, "has_weight": True}


@pytest.mark.parametrize(
    ("change", "field"),
    [
        ({"hidden": 0}, "hidden"),
        ({"hidden": -8}, "hidden"),
        ({"hidden": 12}, "hidden"),
        ({"hidden": 16392}, "hidden"),
        ({"hidden": True}, "hidden"),
        ({"eps": 0.0}, "eps"),
        ({"eps": -1e-5}, "eps"),
        ({"eps": float("inf")}, "eps"),
        ({"eps": float("nan")}, "eps"),
        ({"eps": 1}, "eps"),
        ({"weight_dtype": "fp16"}, "weight_dtype"),
        ({"out_dtype": "half"}, "out_dtype"),
        ({"order": "triton-9"}, "order"),
        ({"gain_center": float("inf")}, "gain_center"),
        ({"has_weight": False, "gain_center": 1.0}, "gain_center"),
        ({"has_weight": False, "gain_center": -0.0}, "gain_center"),
        ({"has_weight": False, "weight_before_norm": True}, "weight_before_norm"),
        ({"has_weight": False, "weight_dtype": "fp32"}, "weight_dtype"),
        ({"enable_pdl": False, "release_early": True}, "release_early"),
    ],
)
def test_impossible_sets_are_refused_by_field(change, field):
    with pytest.raises(ConstantsError, match=rf"RowNormConstants\.{field} is "):
        RowNormConstants(**{**VALID, **change})


def test_every_field_is_documented_in_the_source():
    import ast
    import inspect
    import itertools

    body = ast.parse(inspect.getsource(RowNormConstants)).body[0].body
    documented = {
        before.target.id
        for before, after in itertools.pairwise(body)
        if isinstance(before, ast.AnnAssign) and isinstance(after, ast.Expr) and isinstance(after.value, ast.Constant)
    }
    assert documented >= {f.name for f in dataclasses.fields(RowNormConstants)}
