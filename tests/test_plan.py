import dataclasses
import json

import pytest

from muse_jit.constants import gemm_shapes
from muse_jit.constants.dual_norm import DualNormConstants
from muse_jit.constants.row_norm import RowNormConstants
from muse_jit.errors import ConstantsError, UsageError
from muse_jit.plan import MUSE_SPARK, ROWS, Deployment, make_plan, read_model, read_plan

TEXT = {
    "model_type": "muse_spark_text",
    "hidden_size": 8192,
    "num_attention_heads": 128,
    "head_dim": 64,
    "rms_norm_eps": 1e-05,
    "post_norm_eps": 1e-08,
}


def _norm(arch, eps):
    return {"kernel": "row_norm", "arch": arch, "constants": {"hidden": 8, "eps": eps, "has_weight": False}}


def _config(tmp_path, document):
    path = tmp_path / "config.json"
    path.write_text(document if isinstance(document, str) else json.dumps(document))
    return str(path)


def test_the_first_layer_needs_both_embedding_types():
    plan = make_plan(Deployment(), ["sm_90a"])
    norms = [p.constants for p in plan.kernels if isinstance(p.constants, RowNormConstants)]
    common = {
        "hidden": 8192, "eps": 1e-5, "has_weight": True, "weight_dtype": "bf16", "weight_before_norm": False,
        "gain_center": 1.0, "out_dtype": "bf16", "stream": True, "aux": False, "enable_pdl": True,
        "release_early": True, "order": "triton-3.8",
    }  # fmt: skip
    assert [n.as_dict() for n in norms] == [{**common, "x_fp32": False}, {**common, "x_fp32": True}]


@pytest.mark.parametrize(
    ("tp", "families"),
    [
        (1, {"row_norm", "dual_norm"}),
        (2, {"row_norm", "dual_norm", "all_reduce_dual_norm"}),
        (4, {"row_norm", "dual_norm", "all_reduce_dual_norm"}),
        (8, {"row_norm", "dual_norm", "small_m_gemm", "all_reduce_dual_norm"}),
        (16, {"row_norm", "dual_norm"}),
    ],
)
def test_families_by_tensor_parallel_size(tp, families):
    plan = make_plan(Deployment(tp=tp), ["sm_90a"])
    assert {p.constants.family for p in plan.kernels} == families
    assert plan.unavailable == ()
    assert plan.as_dict()["unavailable"] == []


@pytest.mark.parametrize("tp", [1, 2, 4, 16])
def test_where_o_proj_is_cublas_no_gemm_is_planned(tp):
    plan = make_plan(Deployment(tp=tp), ["sm_90a", "sm_100a"])
    assert not [p for p in plan.kernels if p.constants.family == "small_m_gemm"]


ARCHES = ["sm_90a", "sm_100a", "sm_103a", "sm_120a"]


@pytest.mark.parametrize(
    ("rows", "buckets"), [(ROWS, [8, 16, 32, 64]), ((1, 2, 8), [8]), ((1, 17), [8, 32]), ((64,), [64])]
)
@pytest.mark.parametrize("pdl", [True, False])
def test_tp8_plans_one_gemm_for_each_bucket_of_its_rows_with_each_architectures_shape(rows, buckets, pdl):
    plan = make_plan(Deployment(tp=8, rows=rows, pdl=pdl), ARCHES)
    gemms = plan.only("small_m_gemm").kernels
    assert [(p.arch, p.constants.rows) for p in gemms] == [(arch, rows) for arch in ARCHES for rows in buckets]
    for p in gemms:
        c = p.constants
        assert (c.n, c.k, c.enable_pdl, c.release_early) == (8192, 1024, pdl, pdl)
        assert (c.publish_tp, c.transport, c.capacity) == (8, "peer", 64)
        shape = gemm_shapes.shape_for(8192, 1024, c.rows, p.arch).shape
        assert {name: getattr(c, name) for name in shape._fields} == shape._asdict()
        c.validate_for(p.arch)


def test_the_gemm_has_the_models_sizes():
    model = dataclasses.replace(MUSE_SPARK, hidden_size=4096, num_attention_heads=64, head_dim=128)
    sets = [p.constants for p in make_plan(Deployment(model, rows=(1,)), ["sm_90a"]).only("small_m_gemm").kernels]
    assert [(c.n, c.k, c.rows) for c in sets] == [(4096, 1024, 8)]
    with pytest.raises(ConstantsError, match="k is 1032; the small-M GEMM needs a positive multiple of 32"):
        make_plan(Deployment(dataclasses.replace(model, head_dim=129)), ["sm_90a"])


def test_options_reach_the_constants():
    plan = make_plan(Deployment(order="triton-3.6", pdl=False), ["sm_100a", "sm_100a"])
    assert {p.arch for p in plan.kernels} == {"sm_100a"}
    assert all(p.constants.order == "triton-3.6" and not p.constants.enable_pdl for p in plan.kernels[:2])


@pytest.mark.parametrize(
    ("arch", "order"),
    [("sm_90a", "triton-3.6"), ("sm_100a", "flashinfer-0.7"), ("sm_103a", "flashinfer-0.7"), ("sm_120a", "triton-3.6")],
)
def test_the_attention_boundary_follows_stock_by_architecture(arch, order):
    plan = make_plan(Deployment(tp=16, order="triton-3.6"), [arch])
    (boundary,) = [p.constants for p in plan.kernels if p.constants.family == "dual_norm"]
    assert boundary == DualNormConstants(
        8192, 1e-8, next_eps=1e-5, next_gain_center=1.0, enable_pdl=True, release_early=True, order=order
    )
    plain = make_plan(Deployment(tp=16, pdl=False), [arch]).only("dual_norm").kernels[0].constants
    assert (plain.enable_pdl, plain.release_early) == (False, False)


@pytest.mark.parametrize(("tp", "role"), [(2, "both"), (4, "both"), (8, "consume")])
@pytest.mark.parametrize("sum_order", ["mnnvl", "node-local"])
def test_the_fused_boundary_is_the_boundary_with_the_all_reduce(tp, role, sum_order):
    plan = make_plan(Deployment(tp=tp, sum_order=sum_order, order="triton-3.6"), ["sm_90a", "sm_100a"])
    fused = plan.only("all_reduce_dual_norm").kernels
    alone = plan.only("dual_norm").kernels
    assert [p.arch for p in fused] == ["sm_90a", "sm_100a"]
    assert [p.constants.boundary for p in fused] == [p.constants for p in alone]
    for planned in fused:
        c = planned.constants
        assert (c.tp, c.role, c.sum_order, c.transport, c.capacity) == (tp, role, sum_order, "peer", 64)


@pytest.mark.parametrize(
    ("deployment", "message"),
    [
        ({"tp": 3}, "tensor parallel size 3; allowed: 1, 2, 4, 8, 16"),
        ({"tp": 0}, "tensor parallel size 0"),
        ({"order": "cublas"}, "order 'cublas'; allowed: triton-3.8"),
        ({"sum_order": "ring"}, "sum_order 'ring'; allowed: mnnvl, node-local"),
        ({"rows": (0,)}, "each must be from 1 to 64"),
        ({"rows": (65,)}, "each must be from 1 to 64"),
        ({"rows": ()}, "each must be from 1 to 64"),
    ],
)
def test_wrong_deployments_say_what_is_allowed(deployment, message):
    with pytest.raises(UsageError, match=message):
        make_plan(Deployment(**deployment), ["sm_90a"])


@pytest.mark.parametrize("document", [TEXT, {"model_type": "muse_spark", "text_config": TEXT, "vision_config": {}}])
def test_a_hugging_face_config_gives_the_built_in_numbers(tmp_path, document):
    path = _config(tmp_path, document)
    model = read_model(path)
    assert model.name == path
    assert model.__dict__ | {"name": "muse-spark"} == MUSE_SPARK.__dict__


@pytest.mark.parametrize(
    ("document", "message"),
    [
        ("{", "is not JSON"),
        ("[]", "is not a JSON object"),
        ({"model_type": "llama"}, "model_type 'llama'; supported: muse_spark, muse_spark_text"),
        ({}, "model_type None"),
        ({"model_type": "muse_spark"}, "has no text_config object"),
        ({**TEXT, "hidden_size": None}, "needs a positive whole number hidden_size in its text config, not None"),
        ({**TEXT, "hidden_size": 8192.5}, "positive whole number hidden_size"),
        ({**TEXT, "hidden_size": True}, "positive whole number hidden_size"),
        ({**TEXT, "num_attention_heads": -1}, "positive whole number num_attention_heads"),
        ({**TEXT, "rms_norm_eps": "1e-5"}, "positive finite number rms_norm_eps"),
        ('{"model_type": "muse_spark_text", "hidden_size": Infinity}', "positive whole number hidden_size"),
    ],
)
def test_a_wrong_config_gets_one_clear_line(tmp_path, document, message):
    with pytest.raises(UsageError, match=message) as caught:
        read_model(_config(tmp_path, document))
    assert "\n" not in str(caught.value)


def test_a_tensor_parallel_size_that_does_not_divide(tmp_path):
    model = read_model(_config(tmp_path, {**TEXT, "num_attention_heads": 12}))
    with pytest.raises(UsageError, match="8 does not divide the 12 attention heads"):
        make_plan(Deployment(model, tp=8), ["sm_90a"])


def test_numbers_no_kernel_can_have(tmp_path):
    model = read_model(_config(tmp_path, {**TEXT, "hidden_size": 8190}))
    with pytest.raises(ConstantsError, match="hidden is 8190"):
        make_plan(Deployment(model), ["sm_90a"])


def test_a_written_plan_reads_back_the_same(tmp_path):
    plan = make_plan(Deployment(tp=8), ["sm_90a", "sm_100a"])
    path = _config(tmp_path, plan.as_dict())
    again = read_plan(path)
    assert again == plan
    assert {p.arch for p in read_plan(path, ["sm_120a"]).kernels} == {"sm_120a"}
    assert {p.constants for p in read_plan(path, ["sm_120a"]).kernels} == {p.constants for p in plan.kernels}


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"schema": 2}, "not a plan of schema 1"),
        ({"kernels": {}}, "not a plan of schema 1"),
        ({"kernels": [{}]}, "kernel 0: kernel, arch and constants are needed"),
        ({"kernels": [{"kernel": "nope", "arch": "sm_90a", "constants": {}}]}, "kernel 0: no kernel family 'nope'"),
        ({"kernels": [_norm("sm_1", 1.0)]}, "kernel 0: GPU architecture 'sm_1'"),
        ({"kernels": [_norm("sm_90a", 1)]}, "kernel 0: RowNormConstants.eps is 1"),
    ],
)
def test_a_wrong_plan_file_names_the_item(tmp_path, change, message):
    document = {**make_plan(Deployment(), ["sm_90a"]).as_dict(), **change}
    with pytest.raises((UsageError, ConstantsError), match=message):
        read_plan(_config(tmp_path, document))


def test_only_one_family():
    plan = make_plan(Deployment(tp=8), ["sm_90a"])
    assert {p.constants.family for p in plan.only("row_norm").kernels} == {"row_norm"}
    with pytest.raises(UsageError, match="no kernel of family 'gemm'; it has: "):
        plan.only("gemm")
