"""The adapter for a vLLM that has its own specialised decode: a package of that shape, made here."""

import sys
import types

import pytest

from muse_jit.ops import attention_boundary
from muse_jit.vllm_plugin import newer

TEMPLATE = """
class {name}:
    @classmethod
    def unsupported(cls, vllm_config): ...
    @classmethod
    def build(cls, ctx, layer, {build}): ...
    def prepare_kv(self): ...
    def warm_up(self, device, rows): ...
    def run(self, {run}): ...
"""
RUNS = {
    "LayerFront": ("rows", "x, stream, out, aux=None"),
    "OProjection": ("*, rows=()", "x, out"),
    "AttentionBoundary": ("*, all_reduce=None", "partial, stream, out"),
}


def _module(monkeypatch, name, source=""):
    module = types.ModuleType(name)
    module.__path__ = []
    module.__spec__ = types.SimpleNamespace(name=name)
    exec(source, vars(module))
    monkeypatch.setitem(sys.modules, name, module)
    return module


def _vllm(monkeypatch, **changed):
    """vLLM's modules; the executor's has imported two of the names before."""
    runs = {**RUNS, **changed}
    parts = newer.PACKAGE.split(".")
    for end in range(1, len(parts) + 1):
        _module(monkeypatch, ".".join(parts[:end]))
    _module(monkeypatch, "vllm.distributed", "def get_tp_group(): return 'the group'")
    monkeypatch.setattr(attention_boundary, "find_tp_group", None)
    sources = {}
    for name, where in newer.WHERE.items():
        text = f"def {name}(x): ...\n"
        if name in runs:
            text = TEMPLATE.format(name=name, build=runs[name][0], run=runs[name][1])
        sources[where] = sources.get(where, "") + text
    for folder in ("cutedsl", "cutedsl.boundary", "cutedsl.oproj"):
        _module(monkeypatch, f"{newer.PACKAGE}.{folder}")
    made = {where: _module(monkeypatch, f"{newer.PACKAGE}.{where}", text) for where, text in sources.items()}
    executor = _module(monkeypatch, f"{newer.PACKAGE}.executor")
    executor.Boundary = made["cutedsl.oproj.batt"].AttentionBoundary
    executor.dual = made["cutedsl.oproj.batt"].standalone_dual_norm
    return made, executor


def test_our_objects_take_the_place_of_vllms_everywhere(monkeypatch, caplog):
    made, executor = _vllm(monkeypatch)
    assert newer.has_own_decode()
    with caplog.at_level("INFO", "vllm.muse_jit"):
        assert newer.hand_over()
        assert newer.hand_over()
    ours = newer.ours()
    for name, where in newer.WHERE.items():
        assert getattr(made[where], name) is ours[name]
    assert executor.Boundary is ours["AttentionBoundary"]
    assert executor.dual is ours["standalone_dual_norm"]
    assert attention_boundary.find_tp_group() == "the group"
    assert len(caplog.records) == 1


@pytest.mark.parametrize("name", RUNS)
def test_one_class_that_differs_leaves_all_to_vllm(monkeypatch, caplog, name):
    made, executor = _vllm(monkeypatch, **{name: (RUNS[name][0], "x, out, more")})
    originals = {n: getattr(made[w], n) for n, w in newer.WHERE.items()}
    assert not newer.hand_over()
    assert {n: getattr(made[w], n) for n, w in newer.WHERE.items()} == originals
    assert executor.Boundary is originals["AttentionBoundary"]
    assert f"vLLM keeps its own specialised decode: {name}.run takes" in caplog.text


def test_this_vllm_has_none(monkeypatch):
    monkeypatch.setitem(sys.modules, "vllm", None)
    assert not newer.has_own_decode()
