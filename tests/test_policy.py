"""Modes, late compiles, and the guard during a capture, each through a real service."""

import dataclasses
import logging
import shlex
import sys
import types

import pytest
from support import toy
from support.process import command

from muse_jit.compiler import forkserver
from muse_jit.errors import CompileDuringCapture, MissForbidden, VerifyMismatch
from muse_jit.key.encoding import content_digest
from muse_jit.service import JitService
from muse_jit.store.lookup import Hit
from muse_jit.store.publish import publish, set_aside

pytestmark = pytest.mark.processes


@pytest.fixture
def constants(tmp_path):
    return toy.ToyConstants(value=5, count_file=str(tmp_path / "count"))


def _after_warmup(command_line):
    """The arguments of a `muse-jit warmup` that a message prints, whatever variables stand before it."""
    words = shlex.split(command_line)
    return words[words.index("warmup") + 1 :]


def _service(settings, **options):
    return JitService("sm_90a", settings.with_options(**options))


@pytest.fixture
def capturing(monkeypatch):
    """A stand-in for torch whose current stream is capturing when told so."""
    state = types.SimpleNamespace(now=False, initialized=True)
    cuda = types.SimpleNamespace(
        is_initialized=lambda: state.initialized, is_current_stream_capturing=lambda: state.now
    )
    monkeypatch.setitem(sys.modules, "torch", types.SimpleNamespace(cuda=cuda))
    return state


def test_during_a_capture_only_what_is_in_memory_is_answered(settings, constants, tmp_path, capturing):
    service = _service(settings)
    other = dataclasses.replace(constants, value=6)
    _service(settings).obtain(other)  # on disk, which is not enough: it would have to be loaded
    kernel = service.get(constants)
    capturing.now = True
    assert service.get(constants) is kernel
    assert service.ensure([constants]).hits == 1
    for ask in (service.get, service.obtain, lambda c: service.ensure([constants, c])):
        with pytest.raises(CompileDuringCapture, match="toy for sm_90a, CUDA 13, x86_64 is asked for during") as caught:
            ask(other)
        assert str(other) in str(caught.value)
    with pytest.raises(CompileDuringCapture, match="prepare it before"):
        kernel.prepare(0)
    assert toy.compiles(tmp_path / "count") == 2
    capturing.now = False
    assert service.get(other)() == 6


def test_the_command_in_the_guards_message_prevents_it(settings, constants, tmp_path, capturing):
    service = _service(settings, mode="forbid")
    capturing.now = True
    with pytest.raises(CompileDuringCapture) as caught:
        service.get(constants)
    capturing.now = False
    words = _after_warmup(str(caught.value).partition("filled with: ")[2].partition(" [constants: ")[0])
    code, out, err = command("muse-jit", "warmup", *words, before="from support import toy")
    assert (code, "1 compiled" in out) == (0, True), err
    assert service.get(constants)() == 5


def test_without_a_device_in_use_nothing_is_asked_of_it(settings, constants, capturing):
    capturing.initialized, capturing.now = False, True
    assert _service(settings).get(constants)() == 5


@pytest.mark.parametrize("policy", ["warn", "error", "silent"])
def test_a_miss_after_serving_is_late(settings, constants, tmp_path, caplog, policy):
    service = _service(settings, late_compile=policy)
    service.get(constants)
    assert forkserver._servers
    service.serving()
    assert not forkserver._servers
    late = dataclasses.replace(constants, value=6)
    with caplog.at_level(logging.WARNING, "muse_jit"):
        if policy == "error":
            with pytest.raises(MissForbidden, match=r"the engine serves already \(MUSE_JIT_LATE_COMPILE\); fill it"):
                service.get(late)
        else:
            assert service.obtain(late).status == "compiled"
            set_aside(service.layout, service.key_of(late)[1].digest, service.find(late))  # and it is missing again
            assert service.get(late)() == 6
    said = [r.getMessage() for r in caplog.records if "is compiled while the engine serves" in r.getMessage()]
    assert len(said) == (1 if policy == "warn" else 0)
    assert all("muse-jit warmup" in message for message in said)
    assert toy.compiles(tmp_path / "count") == (1 if policy == "error" else 3)


def test_a_hit_after_serving_is_not_late(settings, constants, caplog):
    _service(settings).obtain(constants)
    service = _service(settings, late_compile="error")
    service.serving()
    assert service.get(constants)() == 5


def _tamper(service, constants):
    """Publish another artifact under the key: sound in itself, and not what the key compiles to."""
    hit = service.find(constants)
    assert isinstance(hit, Hit)
    set_aside(service.layout, hit.entry.digest, hit)
    artifact = hit.artifact + b"\0"
    changed = {"artifact_digest": content_digest(artifact), "artifact_size": len(artifact)}
    publish(service.layout, dataclasses.replace(hit.entry, **changed), artifact)


@pytest.mark.parametrize("how", ["get", "ensure"])
def test_verify_compiles_again_and_compares_once_per_process(settings, constants, tmp_path, how):
    _service(settings).obtain(constants)
    service = _service(settings, mode="verify")
    if how == "ensure":
        assert service.ensure([constants]).hits == 1
    assert service.get(constants)() == 5
    assert service.obtain(constants).status == "hit"
    assert (service.counters.verified, toy.compiles(tmp_path / "count")) == (1, 2)


def test_verify_fills_what_is_missing(settings, constants, tmp_path):
    service = _service(settings, mode="verify")
    assert service.get(constants)() == 5
    assert toy.compiles(tmp_path / "count") == 1
    assert _service(settings, mode="forbid").get(constants)() == 5


def test_verify_refuses_what_is_not_what_it_compiles_to_and_leaves_it_there(settings, constants, tmp_path):
    service = _service(settings)
    service.obtain(constants)
    _tamper(service, constants)
    verifying = _service(settings, mode="verify")
    with pytest.raises(VerifyMismatch, match="is not what compiling it gives now: its GPU code is the same") as caught:
        verifying.get(constants)
    report = _service(settings, mode="verify").ensure([constants])
    assert report.failed == 1
    assert "is not what compiling it gives now" in report.kernels[0].error
    assert service.find(constants).artifact.endswith(b"\0")
    words = _after_warmup(str(caught.value).partition("replace it with: ")[2])
    code, _, err = command("muse-jit", "warmup", *words, before="from support import toy")
    assert code == 0, err
    assert _service(settings, mode="verify").get(constants)() == 5
