"""The start-up of a real vLLM 0.33.0 worker on a machine without a GPU, as far as it goes, twice.

    make test-vllm                                      sets up .venv-vllm
    .venv-vllm/bin/python benchmarks/vllm_startup.py [--out benchmarks/results/cpu/vllm_startup.json]

The first start finds an empty cache and compiles; the second one must find everything, with compiling forbidden. Each
is a process of its own and goes through vLLM's own steps: plugins loaded through entry points, the architecture
resolved by the model registry, the worker made by `WorkerWrapperBase.init_worker`, its `load_model`, its model state
made by `init_model_state`, its `compile_or_warm_up_model`. What has no CPU form is named in the record: the device is
left out, the decoder layers are stubs with vLLM's own norms and connections (tests/support/real_model.py), and the
architecture to compile for is given (sm_90a).
"""

import argparse
import contextlib
import json
import logging
import os
import pathlib
import subprocess
import sys
import tempfile
import time

ROOT = pathlib.Path(__file__).resolve().parents[1]
ARCH = "sm_90a"
LAYERS = 62
HEAVY = ("cutlass", "tvm_ffi", "torch")


class Record:
    """What happened, step by step: seconds, and what stopped a step that cannot go on without a GPU."""

    def __init__(self):
        self.steps = []

    def step(self, name, function, *, may_stop=False):
        started = time.perf_counter()
        entry = {"step": name}
        try:
            return function()
        except Exception as error:
            entry["stops_at"] = f"{type(error).__name__}: {' '.join(str(error).split())[:200]}"
            if not may_stop:
                raise
            return None
        finally:
            entry["seconds"] = round(time.perf_counter() - started, 4)
            self.steps.append(entry)

    def note(self, **values):
        self.steps[-1] |= values


class Lines(logging.Handler):
    """The plugin's log lines."""

    def __init__(self):
        super().__init__(logging.INFO)
        self.lines = []

    def emit(self, record):
        self.lines.append(f"{record.levelname} {record.getMessage()}")


def child(folder, layers):
    """One start; prints its record as JSON on the last line."""
    record, lines = Record(), Lines()
    record.step("import vllm", lambda: __import__("vllm.plugins"))
    logger = logging.getLogger("vllm.muse_jit")
    logger.addHandler(lines)
    logger.setLevel(logging.INFO)  # as vLLM's logger, which its engine sets up
    before = set(sys.modules)

    def register():
        from muse_jit.vllm_plugin import register

        register()

    record.step("muse_jit's register()", register)
    record.note(modules_imported=len(set(sys.modules) - before))
    from vllm.plugins import load_general_plugins

    record.step("load_general_plugins()", load_general_plugins)
    record.step("load_general_plugins() again", load_general_plugins)

    sys.path.insert(0, str(ROOT / "tests"))
    from support import real_model

    config = record.step(
        "ModelConfig through the model registry, VllmConfig", lambda: real_model.vllm_config(pathlib.Path(folder))
    )
    record.note(
        architectures=config.model_config.architectures, model_type=config.model_config.hf_text_config.model_type
    )
    config.model_config.enforce_eager = True  # no CUDA graphs here
    config.parallel_config.worker_cls = "vllm.v1.worker.gpu_worker.Worker"
    worker = record.step("WorkerWrapperBase.init_worker", lambda: make_worker(config, folder))
    record.note(wrapped=hasattr(type(worker).load_model, "muse_jit_stock"))
    record.step("Worker.init_device", worker.init_device, may_stop=True)
    record.step("process group (gloo, one rank)", lambda: make_group(config, folder))
    compiler = sorted(m for m in sys.modules if m.partition(".")[0] == "cutlass")
    record.note(compiler_imported_by_vllm=bool(compiler))
    record.step("Worker.load_model", lambda: load(worker, real_model, layers, record), may_stop=True)
    started, serving = getattr(worker, "muse_jit", None), []
    if started is not None:
        tell = started.service.serving
        started.service.serving = lambda: serving.append(tell())
        record.note(report=started.report.summary(), kernels=len(started.learned.constants))
    record.step("Worker.compile_or_warm_up_model", lambda: warm_up(worker), may_stop=True)
    if started is not None:
        record.note(told_serving=len(serving))
    print(json.dumps({"steps": record.steps, "log": lines.lines, "mode": os.environ.get("MUSE_JIT_MODE", "auto")}))


def make_worker(config, folder):
    """vLLM's own worker, made as its executors do."""
    from vllm.v1.worker.worker_base import WorkerWrapperBase

    wrapper = WorkerWrapperBase()
    arguments = {
        "vllm_config": config,
        "local_rank": 0,
        "rank": 0,
        "distributed_init_method": f"file://{folder}/rendezvous",
        "is_driver_worker": True,
    }
    wrapper.init_worker([arguments])
    return wrapper.worker


def make_group(config, folder):
    from vllm.config import set_current_vllm_config
    from vllm.distributed import init_distributed_environment, initialize_model_parallel

    with set_current_vllm_config(config):
        init_distributed_environment(1, 0, f"file://{folder}/group-{os.getpid()}", 0, "gloo")
        initialize_model_parallel(1, 1)


def load(worker, real_model, layers, record):
    """The worker's own load_model, over a runner that loads stub layers and makes vLLM's own model state."""
    import torch

    import muse_jit
    from muse_jit.vllm_plugin import start

    class Runner:
        """What of a model runner the worker's own methods touch on the way."""

        model_memory_usage, lora_config, is_pooling_model = 0, None, False

        def __init__(self):
            from vllm.model_executor.warmup.jit_warmup import JitWarmupRegistry

            self.jit_warmup_registry = JitWarmupRegistry(worker.vllm_config)

        def load_model(self, load_dummy_weights=False):
            from vllm.v1.worker.gpu.model_states import init_model_state

            self.model = real_model.Model(layers)
            make = lambda: init_model_state(worker.vllm_config, self.model, None, worker.device)  # noqa: E731
            record.step("init_model_state (inside load_model)", make, may_stop=True)

        def get_model(self):
            return self.model

        def maybe_remove_all_loras(self, config):
            pass

        def _dummy_run(self, **options):
            return None, None

        def _dummy_sampler_run(self, hidden_states):
            pass

    worker.device, worker.model_runner = torch.device("cpu"), Runner()
    worker._maybe_get_memory_pool_context = lambda tag: contextlib.nullcontext()  # asks for a CUDA allocator
    start.service_for = lambda device: muse_jit.JitService(ARCH)
    worker.load_model()


def warm_up(worker):
    """The worker's own last step, without what asks for a GPU: warm-up of other kernels, its seed, its checks."""
    import vllm.v1.worker.gpu_worker as module

    module.kernel_warmup = module.set_random_seed = module.enable_gpu_sync_check = lambda *arguments: None
    worker._maybe_activate_jit_monitor = lambda: None
    worker.compile_or_warm_up_model()


def run(mode, cache, layers):
    """One start in a process of its own."""
    with tempfile.TemporaryDirectory() as folder:
        # The V1 runner: vLLM refuses to make a worker for the V2 one where Triton is not installed.
        given = {"MUSE_JIT_MODE": mode, "MUSE_JIT_CACHE_DIR": cache, "VLLM_USE_V2_MODEL_RUNNER": "0"}
        command = [sys.executable, __file__, "--child", folder, "--layers", str(layers)]
        done = subprocess.run(command, env={**os.environ, **given}, capture_output=True, text=True)
    if done.returncode:
        sys.exit(done.stderr[-4000:])
    return json.loads(done.stdout.splitlines()[-1].replace(cache, "CACHE"))


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=pathlib.Path)
    parser.add_argument("--layers", type=int, default=LAYERS)
    parser.add_argument("--child", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.child:
        child(options.child, options.layers)
        return
    import importlib.metadata

    with tempfile.TemporaryDirectory() as cache:
        starts = {
            "first": run("auto", cache, options.layers),
            "second, forbidden": run("forbid", cache, options.layers),
        }
    document = {
        "vllm": importlib.metadata.version("vllm"),
        "torch": importlib.metadata.version("torch"),
        "nvidia-cutlass-dsl": importlib.metadata.version("nvidia-cutlass-dsl"),
        "apache-tvm-ffi": importlib.metadata.version("apache-tvm-ffi"),
        "layers": options.layers,
        "starts": starts,
    }
    text = json.dumps(document, indent=1)
    print(text)
    if options.out:
        options.out.parent.mkdir(parents=True, exist_ok=True)
        options.out.write_text(text + "\n")


if __name__ == "__main__":
    main()
