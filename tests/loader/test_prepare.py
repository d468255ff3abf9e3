"""What of `Kernel.prepare` and of keeping libraries can be seen without a device; the rest is in tests/gpu."""

import gc
import pathlib
import types

import pytest
from support import toy

from muse_jit.errors import LoadError
from muse_jit.loader import capture
from muse_jit.service import JitService

pytestmark = pytest.mark.processes


def _libraries():
    return sum(
        "/memfd:" in line and "r-xp" in line for line in pathlib.Path("/proc/self/maps").read_text().splitlines()
    )


def test_no_library_is_unloaded_when_its_kernel_and_its_service_are_gone(settings):
    """An unload during a capture ends the capture, and when a kernel is collected nobody can choose."""
    service = JitService("sm_90a", settings)
    before = _libraries()
    assert service.get(toy.ToyConstants(value=3))() == 3
    assert _libraries() == before + 1
    del service
    gc.collect()
    assert _libraries() == before + 1


def test_without_a_driver_preparing_says_so(settings):
    try:
        import ctypes

        ctypes.CDLL("libcuda.so.1")
        pytest.skip("there is a CUDA driver")
    except OSError:
        pass
    with pytest.raises(LoadError, match=r"there is no CUDA driver on this machine: libcuda\.so\.1"):
        JitService("sm_90a", settings).get(toy.ToyConstants(value=3)).prepare(0)


@pytest.mark.parametrize(
    ("torch", "expected"),
    [
        (None, False),
        (types.SimpleNamespace(), False),
        (types.SimpleNamespace(cuda=types.SimpleNamespace(is_initialized=lambda: False)), False),
        (
            types.SimpleNamespace(
                cuda=types.SimpleNamespace(is_initialized=lambda: True, is_current_stream_capturing=lambda: True)
            ),
            True,
        ),
    ],
)
def test_a_capture_is_asked_of_torch_only_where_it_uses_a_device(monkeypatch, torch, expected):
    import sys

    monkeypatch.setitem(sys.modules, "torch", torch)
    assert capture.is_capturing() is expected


def test_the_real_torch_without_a_device_is_not_capturing():
    import torch

    assert not torch.cuda.is_initialized()
    assert capture.is_capturing() is False


def test_loads_of_one_block_share_a_folder_and_leave_none(settings, tmp_path, monkeypatch):
    from muse_jit.loader import kernel as loader

    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    service = JitService("sm_90a", settings)
    hits = [service.obtain(toy.ToyConstants(value=v)).hit for v in (1, 2)]
    runtime = service._open_runtime()
    before = sorted(p.name for p in tmp_path.iterdir())
    with loader.several():
        kernels = [loader.load(hit.entry, hit.artifact, runtime) for hit in (*hits, hits[0])]
        (folder,) = set(p.name for p in tmp_path.iterdir()) - set(before)
        assert list((tmp_path / folder).iterdir()) == []
    assert [k() for k in kernels] == [1, 2, 1]
    assert len({k._path for k in kernels}) == 3
    assert sorted(p.name for p in tmp_path.iterdir()) == before
