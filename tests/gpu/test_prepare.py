"""Loading a GPU module ahead of a capture, and what the guard says during one, on a real device."""

import dataclasses
import pathlib
import sys
import threading

import pytest
import torch

sys.path.insert(0, str(pathlib.Path(__file__).parent))
import cases

from muse_jit.errors import CompileDuringCapture, LoadError
from muse_jit.loader.kernel import Kernel
from muse_jit.ops.device import service_for

pytestmark = pytest.mark.gpu

SETS = list(cases.prepared_sets())


@pytest.fixture
def service():
    return service_for(torch.device("cuda", 0))


def _operands(constants, rows=4):
    x = torch.randn(rows, constants.hidden, device="cuda").bfloat16()
    weight = torch.randn(constants.hidden, device="cuda").bfloat16()
    return x, weight, torch.full_like(x, float("nan"))


def _fresh(service, constants):
    """A library of its own, which nothing has called: as in a process that has just started."""
    from muse_jit.loader.kernel import load

    hit = service.obtain(constants).hit
    return load(hit.entry, hit.artifact, service._open_runtime())


def test_a_prepared_kernel_may_be_launched_for_the_first_time_in_a_capture(service):
    kernels = [_fresh(service, c) for c in SETS]
    for kernel in kernels:
        kernel.prepare(0)
        kernel.prepare(0)  # again is fine
    operands = [_operands(c) for c in SETS]
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for kernel, (x, weight, out) in zip(kernels, operands, strict=True):
            kernel(x, weight, out)
    graph.replay()
    torch.cuda.synchronize()
    for kernel, (x, weight, out) in zip(kernels, operands, strict=True):
        captured = out.clone()
        out.fill_(float("nan"))
        kernel(x, weight, out)
        torch.cuda.synchronize()
        assert not out.isnan().any()
        assert torch.equal(captured.view(torch.int16), out.view(torch.int16))


def test_during_a_capture_a_memory_hit_works_and_everything_else_is_refused(service):
    kernel = service.get(SETS[0])
    kernel.prepare(0)
    x, weight, out = _operands(SETS[0])
    missing = dataclasses.replace(SETS[0], hidden=1024)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        assert service.get(SETS[0]) is kernel
        for ask in (service.get, service.obtain, lambda c: service.ensure([c])):
            with pytest.raises(CompileDuringCapture, match="muse-jit warmup"):
                ask(missing)
        with pytest.raises(CompileDuringCapture, match="prepare it before"):
            kernel.prepare(0)
        kernel(x, weight, out)
    graph.replay()
    torch.cuda.synchronize()
    assert not out.isnan().any()


def test_another_thread_may_prepare_while_a_stream_captures(service):
    """In torch's default mode any unsafe call of any thread ends the capture; loading is made safe for it."""
    kernel, other = _fresh(service, SETS[0]), _fresh(service, SETS[1])
    kernel.prepare(0)
    x, weight, out = _operands(SETS[0])
    caught = []

    def prepare():
        try:
            other.prepare(0)
        except Exception as error:
            caught.append(error)

    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, capture_error_mode="global"):
        thread = threading.Thread(target=prepare)
        thread.start()
        thread.join()
        kernel(x, weight, out)
    graph.replay()
    torch.cuda.synchronize()
    assert caught == []
    assert not out.isnan().any()


def test_a_device_that_is_not_there_or_of_another_architecture_is_refused_by_name(service):
    kernel = _fresh(service, SETS[0])
    with pytest.raises(LoadError, match="CUDA_ERROR_INVALID_DEVICE"):
        kernel.prepare(torch.cuda.device_count())
    key = {**kernel.entry.key, "target": {**kernel.entry.key["target"], "arch": "sm_100a"}}
    foreign = Kernel(dataclasses.replace(kernel.entry, key=key), kernel.function, kernel._path, kernel._runtime)
    with pytest.raises(LoadError, match="device 0 is sm_90a, the kernel was compiled for sm_100a"):
        foreign.prepare(0)
