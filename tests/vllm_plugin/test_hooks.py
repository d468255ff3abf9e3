"""The entry point: cheap, safe in every process, and never in the way of a start."""

import logging
import sys
import types

import pytest
from support.process import run

from muse_jit import vllm_plugin
from muse_jit.vllm_plugin import hooks

FAKE_VLLM = """
import importlib.util, importlib.machinery, os, sys, tempfile
root = tempfile.mkdtemp()
os.makedirs(root + "/vllm/v1/worker")
for name in ("vllm", "vllm/v1", "vllm/v1/worker"):
    open(f"{root}/{name}/__init__.py", "w").close()
with open(root + "/vllm/v1/worker/gpu_worker.py", "w") as file:
    file.write("class Worker:\\n"
               "    vllm_config = None\\n"
               "    def load_model(self, *, load_dummy_weights=False): return 'loaded'\\n"
               "    def compile_or_warm_up_model(self): return 'warm'\\n")
sys.path.insert(0, root)
from muse_jit.vllm_plugin import register
"""


def test_the_entry_point_is_the_function():
    from importlib.metadata import entry_points

    (point,) = [p for p in entry_points(group="vllm.general_plugins") if p.name == "muse_jit"]
    assert point.load() is vllm_plugin.register


def test_registering_imports_nothing_heavy_and_is_quick():
    out = run(
        FAKE_VLLM + "register(); register()\n"
        "heavy = [m for m in sys.modules if m.partition('.')[0] in ('torch', 'cutlass', 'tvm_ffi', 'vllm', 'ctypes')]\n"
        "print(heavy, sum('_AfterImport' in type(f).__name__ for f in sys.meta_path))",
        block=("torch", "cutlass", "tvm_ffi"),
    )
    assert out.split("\n")[0] == "[" + ", ".join(f"'{m}'" for m in ("torch", "cutlass", "tvm_ffi")) + "] 1"


WRAPPED = "print(hasattr(Worker.load_model, 'muse_jit_stock'), Worker().load_model(load_dummy_weights=True), "
WRAPPED += "Worker().compile_or_warm_up_model(), Worker.load_model.__name__)"


@pytest.mark.parametrize("first", ["register()\n", ""])
def test_the_worker_is_wrapped_whichever_comes_first(first):
    out = run(FAKE_VLLM + first + "from vllm.v1.worker.gpu_worker import Worker\nregister(); register()\n" + WRAPPED)
    assert out.strip() == "True loaded warm load_model"


def test_off_by_its_variable():
    out = run(FAKE_VLLM + "register()\nfrom vllm.v1.worker.gpu_worker import Worker\n" + WRAPPED, MUSE_JIT_VLLM="0")
    assert out.strip() == "False loaded warm load_model"


def test_a_wrong_variable_is_one_warning_and_off():
    code = "import logging; logging.basicConfig(stream=sys.stdout, format='%(name)s %(message)s')\nregister()\n"
    out = run(FAKE_VLLM + code + "from vllm.v1.worker.gpu_worker import Worker\n" + WRAPPED, MUSE_JIT_VLLM="yes")
    assert out.splitlines() == [
        "vllm.muse_jit muse_jit: the plugin failed and stock runs instead: UsageError: "
        "MUSE_JIT_VLLM is 'yes'; allowed: auto, warm, 0",
        "False loaded warm load_model",
    ]


def test_a_worker_of_another_shape_is_one_warning(monkeypatch, caplog):
    class Worker:
        def load_model(self):
            return "loaded"

    monkeypatch.setitem(sys.modules, hooks.WORKER_MODULE, types.SimpleNamespace(Worker=Worker))
    monkeypatch.setattr(vllm_plugin, "_registered", False)
    with caplog.at_level(logging.WARNING, "vllm.muse_jit"):
        vllm_plugin.register()
    assert [r.getMessage() for r in caplog.records] == [
        "muse_jit: the plugin failed and stock runs instead: TypeError: "
        "vllm.v1.worker.gpu_worker.Worker has no method compile_or_warm_up_model"
    ]
    assert Worker().load_model() == "loaded"


def test_any_failure_after_loading_is_one_warning_and_the_worker_goes_on(caplog):
    class Worker:
        vllm_config = property(lambda self: 1 / 0)

        def load_model(self):
            return "loaded"

        def compile_or_warm_up_model(self):
            return "warm"

    hooks.wrap_worker(types.SimpleNamespace(Worker=Worker))
    with caplog.at_level(logging.WARNING, "vllm.muse_jit"):
        assert (Worker().load_model(), Worker().compile_or_warm_up_model()) == ("loaded", "warm")
    assert [r.getMessage().partition(": ")[2] for r in caplog.records] == [
        "the check of the deployment failed and stock runs instead: ZeroDivisionError: division by zero",
        "preparing kernels failed and stock runs instead: ZeroDivisionError: division by zero",
    ]


def test_what_stock_raises_passes_unchanged():
    class Worker:
        vllm_config = None

        def load_model(self):
            raise KeyError("weights")

        def compile_or_warm_up_model(self):
            return None

    hooks.wrap_worker(types.SimpleNamespace(Worker=Worker))
    with pytest.raises(KeyError, match="weights"):
        Worker().load_model()
