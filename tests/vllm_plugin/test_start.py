"""From a loaded worker to replaced calls: what is compiled, what is said, and that nothing breaks a start."""

import logging
import types

import pytest
import torch
from support.stub_model import Model, Worker, vllm_config

from muse_jit.errors import LoadError, MissForbidden
from muse_jit.plan import Deployment, make_plan
from muse_jit.report import KernelReport, Report
from muse_jit.vllm_plugin import deployment, hooks, start
from muse_jit.vllm_plugin.hooks import Refused
from muse_jit.vllm_plugin.layers import learn


class FakeService:
    """Stands in for JitService: counts what it was asked for."""

    def __init__(self, failing=(), error=None):
        self.asked, self.loaded, self.ready, self.failing, self.error = [], [], 0, failing, error
        self.prepared, self.no_driver = [], False

    def ensure(self, constants, *, peers=None):
        if self.error is not None:
            raise self.error
        self.asked.append(tuple(constants))
        return Report(tuple(self._one(c) for c in constants), 0.01, "/cache")

    def _one(self, constants):
        failed = constants.family in self.failing
        error = "the kernel does not compile" if failed else None
        return KernelReport("0" * 64, constants.family, "sm_90a", "failed" if failed else "hit", error=error)

    def get(self, constants):
        self.loaded.append(constants)
        return types.SimpleNamespace(prepare=self.prepare)

    def prepare(self, index):
        self.prepared.append(index)
        if self.no_driver:
            raise LoadError("there is no CUDA driver on this machine")

    def serving(self):
        self.ready += 1


@pytest.fixture
def service(monkeypatch, caplog):
    made = FakeService()
    monkeypatch.setattr(start, "service_for", lambda device: made)
    caplog.set_level(logging.INFO, "vllm.muse_jit")
    return made


@pytest.fixture(scope="module")
def model():
    return Model()


def _after(worker):
    """As the wrapped worker calls it: failures are contained."""
    hooks._before_load(worker)
    hooks._after_load(worker)


def _lines(caplog, level=logging.WARNING):
    return [r.getMessage() for r in caplog.records if r.levelno >= level and r.name == "vllm.muse_jit"]


def test_exactly_the_plans_norms_are_ensured_and_one_line_is_said(model, service, caplog):
    worker = Worker(model, vllm_config(tp=8))
    _after(worker)
    plan = make_plan(Deployment(tp=8), ["sm_90a"])
    # o_proj and its all-reduce stay stock's; what takes their place is ensured when the decode builder makes it.
    norms = {p.constants for family in ("row_norm", "dual_norm") for p in plan.only(family).kernels}
    assert [set(asked) for asked in service.asked] == [norms]
    (line,) = _lines(caplog, logging.INFO)
    assert line.startswith("muse_jit: 3 kernels: 3 hits, 0 compiled; ")
    assert line.endswith("; 3 layers; nothing is replaced")
    assert service.ready == 0
    hooks._when_ready(worker)
    assert service.ready == 1


def test_warm_fills_the_cache_only(model, service, monkeypatch):
    monkeypatch.setenv("MUSE_JIT_VLLM", "warm")
    worker = Worker(model, vllm_config(pipeline_parallel_size=1))
    _after(worker)
    assert len(service.asked[0]) == 3
    assert worker.muse_jit.steps is None
    assert "forward" not in vars(model.model)


def test_another_model_is_not_touched(service, caplog):
    worker = Worker(None, vllm_config(model_config__hf_text_config=types.SimpleNamespace(model_type="llama")))
    _after(worker)
    hooks._when_ready(worker)
    assert service.asked == []
    assert _lines(caplog, logging.INFO) == []


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"parallel_config__pipeline_parallel_size": 2}, "pipeline parallelism"),
        ({"parallel_config__use_ubatching": True}, "DBO or microbatches"),
        ({"offload_config__uva__cpu_offload_gb": 4}, "weights offloaded to the CPU"),
        ({"compilation_config__mode": types.SimpleNamespace(name="STOCK_TORCH_COMPILE")}, "torch.compile"),
        ({"offload_config": None}, "a vLLM whose configuration is another"),
    ],
)
def test_any_doubt_leaves_stock_and_compiles_nothing(model, service, caplog, change, reason):
    worker = Worker(model, vllm_config(**change))
    _after(worker)
    assert service.asked == []
    (line,) = _lines(caplog, logging.INFO)
    assert line.startswith(f"muse_jit: nothing is compiled or replaced: stock runs with {reason}")
    hooks._when_ready(worker)


def test_a_miss_where_compiling_is_forbidden_is_one_warning_with_the_remedy(model, service, caplog):
    service.error = MissForbidden("row_norm is not in the cache; fill it with: muse-jit warmup --arch sm_90a")
    _after(Worker(model, vllm_config()))
    (line,) = _lines(caplog)
    assert "preparing kernels failed and stock runs instead: MissForbidden" in line
    assert "muse-jit warmup --arch sm_90a" in line


def test_one_kernel_that_fails_leaves_its_calls_stock(model, service, caplog):
    service.failing = ("dual_norm",)
    worker = Worker(model, vllm_config())
    _after(worker)
    assert _lines(caplog) == ["muse_jit: layer 0 (and 2 more) stays stock: the kernel does not compile"]
    assert [c.family for c in worker.muse_jit.learned.constants] == ["row_norm", "row_norm"]


def test_what_an_unknown_version_would_not_launch_is_not_compiled(model, monkeypatch):
    reasons = {True: "the order of FlashInfer 9 is not known", False: None}
    monkeypatch.setattr(start, "unknown_stock", lambda arch, boundary: reasons[boundary])
    left = start.of_known_stock(learn(model.model, enable_pdl=True), "sm_103a")
    assert [c.family for c in left.constants] == ["row_norm", "row_norm"]
    assert left.refused["layer 2"] == "the order of FlashInfer 9 is not known"


@pytest.mark.parametrize("no_driver", [False, True])
def test_gpu_modules_are_prepared_on_the_workers_device(model, service, caplog, no_driver):
    service.no_driver = no_driver
    start.obtain(torch.device("cuda", 3), learn(model.model, enable_pdl=True))
    assert set(service.loaded) == set(service.asked[0])
    assert service.prepared == ([3] if no_driver else [3, 3, 3])
    assert _lines(caplog) == (
        ["muse_jit: GPU modules are loaded by a first launch: there is no CUDA driver on this machine"] * no_driver
    )


@pytest.mark.parametrize("model_without", ["model", "layers"])
def test_a_model_of_another_shape_is_one_warning(service, caplog, model_without):
    outer = types.SimpleNamespace() if model_without == "model" else types.SimpleNamespace(model=object())
    _after(Worker(outer, vllm_config()))
    assert _lines(caplog) == [
        "muse_jit: preparing kernels failed and stock runs instead: ValueError: SimpleNamespace has no model.layers"
    ]


def test_layers_that_cannot_be_read_stay_stock(service):
    model = Model(layers=4).model
    model.layers[0].self_attn.pre_qkv_proj_norm.variance_size_override = 4096
    del model.layers[1].add_attn.beta
    model.layers[2].residual_dtype = torch.bfloat16
    learned = learn(model, enable_pdl=True)
    assert list(learned.boundaries) == [0, 3]
    assert learned.front == ()
    assert "full hidden size, not 4096" in learned.refused["the first layer's norm"]
    assert "no gates alpha and beta" in learned.refused["layer 1"]
    assert "must be torch.float32, not torch.bfloat16" in learned.refused["layer 2"]


@pytest.mark.parametrize(
    ("attribute", "value", "reason"),
    [
        ("is_sequence_parallel", True, "the residual stream is spread over the ranks (sequence parallelism)"),
        ("do_not_compile", False, "the model is compiled by torch.compile"),
    ],
)
def test_a_model_that_runs_otherwise_is_left_to_stock(service, caplog, attribute, value, reason):
    model = Model(layers=1)
    setattr(model.model, attribute, value)
    _after(Worker(model, vllm_config()))
    assert service.asked == []
    (line,) = _lines(caplog)
    assert line.endswith(reason)


def test_a_tap_before_the_first_layer_leaves_its_norm_to_stock():
    model = Model(layers=1).model
    model.aux_hidden_state_layers = (0, 2)
    learned = learn(model, enable_pdl=True)
    assert learned.front == ()
    assert list(learned.boundaries) == [0]


ASKED = {"additional_config": {"decode_backend": "latency_specialized"}}


@pytest.mark.parametrize(
    ("tp", "change", "reason"),
    [
        (1, {}, "an attention boundary at TP1"),
        (32, {}, "an attention boundary at TP32"),
        (16, {"lora_config": object()}, "LoRA"),
        (16, {"model_config__enable_sleep_mode": True}, "sleep mode"),
        (16, {"use_v2_model_runner": False}, "the V1 model runner"),
        (16, {"compilation_config__cudagraph_mode": None}, "without FULL decode CUDA graphs"),
        (16, {"speculative_config": types.SimpleNamespace(method="eagle3")}, "speculative methods but DSpark"),
        (16, {"parallel_config__use_ubatching": True}, "DBO"),
        (16, {"model_config__hf_text_config__hidden_size": 4096}, r"hidden_size 4096 \(Muse Spark's is 8192\)"),
        (16, {"model_config__hf_text_config__num_attention_heads": 64}, "num_attention_heads 64"),
        (16, {"speculative_config": ...}, "a vLLM whose configuration is another"),
    ],
)
def test_the_decode_builder_refuses_before_the_weights_are_loaded(service, tp, change, reason):
    config = vllm_config(tp, **ASKED, **{k: v for k, v in change.items() if v is not ...})
    if ... in change.values():
        del config.speculative_config
    with pytest.raises(Refused, match=f"specialised decode of Muse Spark .* does not support .*{reason}"):
        hooks._before_load(Worker(None, config))


@pytest.mark.parametrize("mixed", ["FULL"])
def test_the_decode_builder_refuses_full_graphs_of_mixed_batches(service, mixed):
    config = vllm_config(**ASKED)
    config.compilation_config.cudagraph_mode.mixed_mode = lambda: types.SimpleNamespace(name=mixed)
    with pytest.raises(Refused, match="FULL CUDA graphs of mixed batches"):
        hooks._before_load(Worker(None, config))


def test_a_decode_backend_that_does_not_exist_is_refused(service):
    with pytest.raises(Refused, match="decode_backend is 'fast'; allowed: auto, latency_specialized"):
        hooks._before_load(Worker(None, vllm_config(additional_config={"decode_backend": "fast"})))


def test_the_decode_builder_is_ignored_when_only_warming(service, monkeypatch, caplog):
    monkeypatch.setenv("MUSE_JIT_VLLM", "warm")
    hooks._before_load(Worker(None, vllm_config(tp=1, **ASKED)))
    assert _lines(caplog) == ["muse_jit: decode_backend=latency_specialized is ignored with MUSE_JIT_VLLM=warm"]


@pytest.mark.parametrize("tp", [2, 4, 8, 16])
def test_what_the_decode_builder_serves(service, tp):
    config = vllm_config(tp=tp, **ASKED)
    assert deployment.unsupported(config) is None
    hooks._before_load(Worker(None, config))
