"""The plugin inside the real vLLM: discovery, what it wraps, what it reads from real configurations, the builder."""

import json
import logging
import types

import pytest
import torch
from support.process import run
from support.real_model import H, Model, run_natively, stock, vllm_config

from muse_jit.ops import attention_boundary
from muse_jit.report import KernelReport, Report
from muse_jit.vllm_plugin import builder, hooks, start
from muse_jit.vllm_plugin.deployment import SPECIALIZED, decode_backend, doubt, is_muse_spark, unsupported
from muse_jit.vllm_plugin.hooks import Refused
from muse_jit.vllm_plugin.newer import has_own_decode

LOADED = """
import json, sys
import vllm.plugins, torch
before = set(sys.modules)
vllm.plugins.load_general_plugins()
vllm.plugins.load_general_plugins()
vllm.plugins.plugins_loaded = False
vllm.plugins.load_general_plugins()
new = sorted(m for m in set(sys.modules) - before if m.partition('.')[0] in ('muse_jit', 'cutlass', 'tvm_ffi'))
hooks = sum(type(f).__name__ == '_AfterImport' for f in sys.meta_path)
"""


def test_it_is_discovered_and_loaded_through_its_entry_point():
    from vllm.plugins import load_plugins_by_group

    from muse_jit.vllm_plugin import register

    assert load_plugins_by_group("vllm.general_plugins")["muse_jit"] is register


def test_loading_it_again_and_again_hooks_once_and_touches_nothing():
    out = run(LOADED + "print(json.dumps([new, hooks, torch.cuda.is_initialized()]))")
    new, hook_count, initialized = json.loads(out.splitlines()[-1])
    ours = ("", ".errors", ".settings", ".vllm_plugin", ".vllm_plugin.hooks")
    assert new == [f"muse_jit{name}" for name in ours]
    assert (hook_count, initialized) == (1, False)


def test_the_real_worker_is_wrapped_after_its_import():
    out = run(
        LOADED + "import vllm.v1.worker.gpu_worker as w\n"
        "print([hasattr(getattr(w.Worker, n), 'muse_jit_stock') for n in ('load_model', 'compile_or_warm_up_model')])"
    )
    assert out.splitlines()[-1] == "[True, True]"


@pytest.mark.parametrize(
    ("variables", "hooked"),
    [({"VLLM_PLUGINS": "muse_jit"}, 1), ({"VLLM_PLUGINS": "other"}, 0), ({"MUSE_JIT_VLLM": "0"}, 0)],
)
def test_it_is_off_by_vllms_variable_and_by_its_own(variables, hooked):
    assert run(LOADED + "print(hooks)", **variables).splitlines()[-1] == str(hooked)


def _on_a_gpu(config):
    """What vLLM would have set on a GPU, where it takes the V2 runner and captures graphs."""
    from vllm.config import CUDAGraphMode

    config.compilation_config.cudagraph_mode = CUDAGraphMode.FULL_AND_PIECEWISE
    return config


@pytest.fixture
def config(tmp_path, monkeypatch):
    monkeypatch.setenv("VLLM_USE_V2_MODEL_RUNNER", "1")
    return _on_a_gpu(vllm_config(tmp_path, 16, additional_config={"decode_backend": SPECIALIZED}))


def test_a_real_configuration_is_read(config, tmp_path):
    from vllm.config import DeviceConfig, VllmConfig

    assert is_muse_spark(config)
    assert decode_backend(config) == SPECIALIZED
    assert doubt(config) is None
    assert unsupported(config) is None
    assert not is_muse_spark(VllmConfig(device_config=DeviceConfig(device="cpu")))
    assert not has_own_decode()


def _set(path, value):
    def change(config):
        *owners, name = path.split(".")
        owner = config
        for part in owners:
            owner = getattr(owner, part)
        object.__setattr__(owner, name, value)

    return change


def _graphs(name):
    def change(config):
        from vllm.config import CUDAGraphMode

        config.compilation_config.cudagraph_mode = CUDAGraphMode[name]

    return change


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (_set("parallel_config.pipeline_parallel_size", 2), "pipeline parallelism"),
        (_set("parallel_config.enable_dbo", True), "DBO or microbatches"),
        (_set("offload_config.uva.cpu_offload_gb", 1.0), "weights offloaded to the CPU"),
        (_set("offload_config.prefetch.offload_group_size", 2), "weights offloaded to the CPU"),
        (_set("lora_config", object()), "LoRA"),
        (_set("model_config.enable_sleep_mode", True), "sleep mode"),
        (_set("model_config.hf_text_config.hidden_size", 4096), r"hidden_size 4096"),
        (_set("speculative_config", types.SimpleNamespace(method="ngram")), "speculative methods but DSpark"),
        (_set("parallel_config.tensor_parallel_size", 1), "an attention boundary at TP1"),
        (_graphs("NONE"), "without FULL decode CUDA graphs"),
        (_graphs("PIECEWISE"), "without FULL decode CUDA graphs"),
        (_graphs("FULL"), "FULL CUDA graphs of mixed batches"),
    ],
)
def test_real_configurations_that_the_builder_refuses(config, change, reason):
    change(config)
    with pytest.raises(Refused, match=reason):
        start.before_load(types.SimpleNamespace(vllm_config=config))


def test_torch_compile_and_the_v1_runner_are_refused(config, monkeypatch):
    from vllm.config import CompilationMode

    monkeypatch.setenv("VLLM_USE_V2_MODEL_RUNNER", "0")
    assert unsupported(config) == "the V1 model runner"
    config.compilation_config.mode = CompilationMode.STOCK_TORCH_COMPILE
    assert unsupported(config) == "torch.compile"


class _Service:
    def __init__(self):
        self.asked = None

    def ensure(self, constants, *, peers=None):
        self.asked = tuple(constants)
        return Report(tuple(KernelReport("", c.family, "sm_90a", "hit") for c in constants), 0.0, "/cache")

    def get(self, constants):
        return types.SimpleNamespace(prepare=lambda index: None)


class _Front:
    INPUT_DTYPES, hidden = (torch.bfloat16, torch.float32), H

    def __init__(self, layer):
        self.norm = layer.self_attn.pre_qkv_proj_norm

    @classmethod
    def build(cls, ctx, layer, rows):
        return cls(layer)

    def run(self, x, stream, out):
        stream.copy_(x)
        out.copy_(self.norm.forward_native(stream, None, torch.bfloat16))


class _Dual:
    """The dual norm by stock's native steps, from the operands it is given."""

    def run(self, partial, stream, post_weight, alpha, beta, next_weight, out):
        branch = stock.MuseSpark1xRMSNorm(H, eps=1e-8, has_weight=False).forward_native(partial)
        stream.copy_(alpha * stream + beta * branch.float())
        following = stock.MuseSpark1xRMSNorm(H, eps=1e-5, zero_centered_gamma=True)
        following.weight = next_weight
        out.copy_(following.forward_native(stream, None, torch.bfloat16))


@pytest.fixture
def built(config, monkeypatch, parallel_state):
    """A worker whose decode builder ran: vLLM's own groups and forward context, kernels in torch."""
    run_natively(monkeypatch)
    service = _Service()
    monkeypatch.setattr(start, "service_for", lambda device: service)
    monkeypatch.setattr(builder, "LayerFront", _Front)
    dual = _Dual()
    monkeypatch.setattr(attention_boundary, "standalone_dual_norm", lambda constants: dual)
    model = Model()
    runner = types.SimpleNamespace(get_model=lambda: model)
    worker = types.SimpleNamespace(vllm_config=config, device=torch.device("cpu"), model_runner=runner)
    expected = _forward(config, model, 4)
    hooks._before_load(worker)
    hooks._after_load(worker)
    return worker, model, expected


def _forward(config, model, rows, mode=None):
    from vllm.config import CUDAGraphMode
    from vllm.forward_context import set_forward_context

    embeds = torch.randn(rows, H, generator=torch.Generator().manual_seed(rows)).bfloat16()
    mode = CUDAGraphMode.NONE if mode is None else mode
    with set_forward_context({}, config, num_tokens=rows, cudagraph_runtime_mode=mode):
        return model.model(None, torch.arange(rows), None, inputs_embeds=embeds)


def test_the_builder_runs_captured_decode_steps_and_nothing_else(built, config, monkeypatch):
    from vllm.config import CUDAGraphMode

    worker, model, expected = built
    steps = worker.muse_jit.steps
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    assert torch.equal(_forward(config, model, 4), expected)
    assert steps.launches == {"front": 0, "boundary": 0, "o_proj": 0}  # eager, profiling, prefill: not captured
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    _forward(config, model, 4, CUDAGraphMode.PIECEWISE)
    _forward(config, model, 65)
    assert steps.launches == {"front": 0, "boundary": 0, "o_proj": 0}
    assert torch.equal(_forward(config, model, 4), expected)
    assert steps.launches == {"front": 1, "boundary": 3, "o_proj": 3}


def test_a_layer_that_cannot_be_built_refuses_the_start(config, monkeypatch, parallel_state):
    monkeypatch.setattr(start, "service_for", lambda device: _Service())
    model = Model()
    model.model.layers[1].pre_ffn_norm.variance_size_override = 4096
    runner = types.SimpleNamespace(get_model=lambda: model)
    worker = types.SimpleNamespace(vllm_config=config, device=torch.device("cpu"), model_runner=runner)
    with pytest.raises(Refused, match=r"cannot be built: layer 1: the dual norm reduces over the full hidden size"):
        hooks._after_load(worker)


@pytest.mark.parametrize(
    ("backend", "uses", "order"),
    [("mnnvl", True, "mnnvl"), ("trtllm", True, "node-local"), ("other", True, None), ("mnnvl", False, None)],
)
def test_the_order_of_stocks_all_reduce(monkeypatch, backend, uses, order):
    import vllm.distributed.device_communicators.flashinfer_all_reduce as module

    monkeypatch.setattr(module, "_fi_ar_workspace", types.SimpleNamespace(backend=backend))
    communicator = types.SimpleNamespace(disabled=False, should_use_fi_ar=lambda sample: uses and sample.shape[1] == H)
    group = types.SimpleNamespace(
        device=torch.device("cpu"), device_communicator=types.SimpleNamespace(fi_ar_comm=communicator)
    )
    assert builder.stock_sum_order(group) == order
    communicator.disabled = True
    assert builder.stock_sum_order(group) is None


def test_stocks_all_reduce_has_what_is_read():
    """The names that `stock_sum_order` relies on."""
    import inspect

    from vllm.distributed.device_communicators import cuda_communicator, flashinfer_all_reduce

    assert "self.fi_ar_comm" in inspect.getsource(cuda_communicator)
    assert hasattr(flashinfer_all_reduce, "_fi_ar_workspace")
    assert "should_use_fi_ar" in vars(flashinfer_all_reduce.FlashInferAllReduce)


def test_the_plugins_lines_are_children_of_vllms_logger():
    parent = logging.getLogger("vllm")
    assert hooks.logger.parent is parent
    assert start.logger is builder.logger is hooks.logger
