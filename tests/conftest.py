"""Fixtures for all tests: no setting of the machine reaches them, and each has a cache of its own."""

import importlib.util

import pytest

from muse_jit.settings import Settings

# What needs the real vLLM is run by `make test-vllm`, in an environment that has it.
collect_ignore = [] if importlib.util.find_spec("vllm") else ["with_vllm"]


@pytest.fixture(autouse=True)
def _no_settings_from_outside(monkeypatch, request):
    """Tests on a GPU keep them: they use the machine's cache, which may have been filled elsewhere."""
    import os

    gpu = request.node.get_closest_marker("gpu") or request.node.get_closest_marker("multigpu")
    for name in [] if gpu else list(os.environ):
        if name.startswith(("MUSE_JIT_", "VLLM_", "CUTE_DSL_")) or name == "CC":
            monkeypatch.delenv(name)


@pytest.fixture
def settings(tmp_path):
    """Settings with a cache folder below the test's own."""
    return Settings().with_options(cache_dir=str(tmp_path / "cache"))


def pytest_collection_modifyitems(items):
    """GPU tests are skipped, with the reason, where their hardware is not."""
    reasons = {}
    for item in items:
        for marker, need in (("gpu", 1), ("multigpu", 2)):
            if item.get_closest_marker(marker):
                if need not in reasons:
                    reasons[need] = _why_not(need)
                if reasons[need]:
                    item.add_marker(pytest.mark.skip(reason=reasons[need]))


def _why_not(count):
    import torch

    if not torch.cuda.is_available():
        return "no CUDA device"
    if torch.cuda.device_count() < count:
        return f"needs {count} CUDA devices"
    capability = torch.cuda.get_device_capability()
    return "" if capability == (9, 0) else f"needs compute capability 9.0, found {capability}"
