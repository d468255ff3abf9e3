"""The worker process, from outside: what it returns, how it fails, what it may see."""

import dataclasses
import os
import re
import time

import pytest
from support import toy
from support.process import alive, run, start

from muse_jit.compiler.build import build
from muse_jit.compiler.process import first_error
from muse_jit.errors import CompileError, LinkerMissing
from muse_jit.kernels.registry import class_text, family_named, register_kernel
from muse_jit.key.kernel_key import KernelKey
from muse_jit.key.source import source_of
from muse_jit.key.target import Target

pytestmark = pytest.mark.processes

TARGET = Target("sm_90a", 13, "x86_64")
RUNTIME = "/dev/null"  # the toy calls nothing of it; ld takes an empty file for an empty linker script


def _build(constants, *, timeout=60.0, cc=None, source=None, outside=None, options=None, family="toy"):
    chosen = family_named(family)
    found = source_of(chosen.build, also=class_text(type(constants)))
    found = dataclasses.replace(found, digest=source or found.digest, outside=outside or found.outside)
    key = KernelKey(family, constants.as_dict(), TARGET, {}, found.digest, chosen.build, options or {})
    return build(chosen, constants, key, runtime_library=RUNTIME, source=found, timeout=timeout, cc=cc)


def test_the_artifact_comes_back_in_memory_and_nothing_is_left(tmp_path, monkeypatch):
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    monkeypatch.setattr("tempfile.tempdir", None)
    built = _build(toy.ToyConstants(value=3))
    assert built.artifact.startswith(b"\x7fELF")
    assert built.compile_seconds > 0
    assert built.link_seconds > 0
    assert list(tmp_path.iterdir()) == []


def test_two_builds_are_byte_for_byte_the_same():
    assert _build(toy.ToyConstants(value=3)).artifact == _build(toy.ToyConstants(value=3)).artifact


@pytest.mark.parametrize(
    ("behaviour", "message"),
    [
        ("fail", "ValueError: the toy was told to fail"),
        ("error_line", "toy.py:1: error: operand #0 is of the wrong kind"),
        ("crash", "the compile worker ended without a result (killed by SIGABRT)"),
        ("silent", "the compile worker ended without a result (exit code 0)"),
        ("wrong_type", "TypeError: support.toy:build returned object; it must return what cute.compile returned"),
    ],
)
def test_an_error_names_kernel_constants_and_cause_in_one_line(behaviour, message):
    constants = toy.ToyConstants(behaviour=behaviour)
    with pytest.raises(CompileError) as caught:
        _build(constants)
    text = str(caught.value)
    assert text.startswith("toy for sm_90a, CUDA 13, x86_64 did not compile: ")
    assert message in text
    assert text.endswith(f"[constants: {constants}]")
    assert "\n" not in text


def test_the_log_is_complete():
    with pytest.raises(CompileError) as caught:
        _build(toy.ToyConstants(behaviour="error_line"))
    assert "noise before" in caught.value.log
    assert "Traceback" in caught.value.log


def test_a_compile_that_hangs_is_ended():
    started = time.monotonic()
    with pytest.raises(CompileError, match=r"did not finish within 1 s \(MUSE_JIT_COMPILE_TIMEOUT\)"):
        _build(toy.ToyConstants(behaviour="hang"), timeout=1.0)
    assert time.monotonic() - started < 30


def test_the_log_of_a_compile_that_hung_says_where():
    with pytest.raises(CompileError) as caught:
        _build(toy.ToyConstants(behaviour="hang"), timeout=1.0)
    assert re.search(r'File ".*support/toy\.py", line \d+ in build', caught.value.log)


UNASKED = """
import dataclasses
from muse_jit.constants.row_norm import RowNormConstants
from muse_jit.kernels.registry import register_kernel

def build(constants, target):
    import cutlass.base_dsl.env_manager as manager
    def detect(prefix): raise AssertionError("the driver was asked for its GPU")
    manager.detect_gpu_arch = detect
    from muse_jit.kernels.row_norm import build as real
    return real(constants, target)

@dataclasses.dataclass(frozen=True, eq=False)
class UnaskedConstants(RowNormConstants):
    pass

register_kernel("unasked", UnaskedConstants, "unasked_kernel:build")
"""


def test_the_dsl_does_not_ask_the_driver_for_an_architecture(tmp_path, monkeypatch):
    """On a machine with a driver it cannot be asked in a fork: the DSL's error asks it again, without end."""
    (tmp_path / "unasked_kernel.py").write_text(UNASKED)
    monkeypatch.syspath_prepend(str(tmp_path))
    from unasked_kernel import UnaskedConstants  # registers the family

    from muse_jit.key.toolchain import identify, runtime_library

    constants = UnaskedConstants(hidden=2048, eps=1e-5, has_weight=False, gain_center=0.0)
    cuda = identify(None, "x86_64").cuda
    target = Target("sm_90a", cuda, "x86_64")
    family = family_named("unasked")
    found = source_of(family.build, also=class_text(UnaskedConstants))
    key = KernelKey("unasked", constants.as_dict(), target, {}, found.digest, family.build, {})
    built = build(family, constants, key, runtime_library=runtime_library(cuda), source=found, timeout=60.0)
    assert built.resources[0]["registers"] > 0


def test_a_source_that_changed_meanwhile_is_not_published():
    with pytest.raises(CompileError, match="source changed while it was compiled"):
        _build(toy.ToyConstants(), source="0" * 64)


def test_without_a_linker_nothing_is_compiled(tmp_path, monkeypatch):
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    count = tmp_path / "count"
    with pytest.raises(LinkerMissing, match=r"install gcc, or pip install 'muse_jit\[linker\]'"):
        _build(toy.ToyConstants(count_file=str(count)))
    assert toy.compiles(count) == 0


def test_a_linker_that_fails_is_a_compile_error_with_its_words(tmp_path):
    broken = tmp_path / "my linker"
    broken.write_text("#!/bin/sh\necho 'cannot find -lmoon' >&2\nexit 1\n")
    broken.chmod(0o755)
    with pytest.raises(CompileError, match="linking failed: cannot find -lmoon"):
        _build(toy.ToyConstants(), cc=f"'{broken}'")


def test_a_cc_that_is_not_there_falls_back(tmp_path):
    assert _build(toy.ToyConstants(), cc=str(tmp_path / "nowhere")).artifact


SPY = """
import os
from support.toy import _Object, ToyConstants
from muse_jit.kernels.registry import register_kernel

def build(constants, target):
    import sys
    with open(constants.count_file, "w") as file:
        file.write(repr({k: v for k, v in os.environ.items()}) + chr(10) + os.getcwd() + chr(10))
        file.write(repr([m for m in ("torch", "cutlass") if sys.modules.get(m) is not None]))
    return _Object(1)

register_kernel("spy", ToyConstants, "spy_kernel:build")
"""


def test_the_worker_sees_no_gpu_and_no_setting_that_is_not_in_the_key(tmp_path, monkeypatch):
    (tmp_path / "spy_kernel.py").write_text(SPY)
    monkeypatch.syspath_prepend(str(tmp_path))
    import spy_kernel  # noqa: F401  (registers the family)

    for name in ("CUTE_DSL_LINEINFO", "CUTE_DSL_ARCH", "PYTHONPATH", "MUSE_JIT_MODE", "SECRET_TOKEN"):
        monkeypatch.setenv(name, "1")
    seen = tmp_path / "seen"
    _build(toy.ToyConstants(count_file=str(seen)), family="spy", options={"ENABLE_ASSERTIONS": "1"})
    environment, folder, modules = seen.read_text().splitlines()
    values = eval(environment)
    assert values["CUDA_VISIBLE_DEVICES"] == ""
    assert values["CUTE_DSL_ENABLE_ASSERTIONS"] == "1"
    assert values["CUTE_DSL_ARCH"] == "sm_90a"
    assert not {"CUTE_DSL_LINEINFO", "PYTHONPATH", "MUSE_JIT_MODE", "SECRET_TOKEN"} & set(values)
    assert folder != os.getcwd()
    assert modules == "[]"


def test_the_worker_dies_with_its_parent(tmp_path):
    count = tmp_path / "count"
    code = (
        "import threading, os, time\n"
        "from muse_jit.kernels.registry import family_named\n"
        "from muse_jit.key.kernel_key import KernelKey\nfrom muse_jit.key.source import source_of\n"
        "from muse_jit.key.target import Target\nfrom muse_jit.compiler.build import build\n"
        "from support import toy\n"
        f"c = toy.ToyConstants(behaviour='hang', count_file={str(count)!r})\n"
        "f = family_named('toy')\n"
        "t, s = Target('sm_90a', 13, 'x86_64'), source_of(f.build, also='support.toy:ToyConstants')\n"
        "k = KernelKey('toy', c.as_dict(), t, {}, s.digest, f.build, {})\n"
        "t = threading.Thread(target=lambda: build(f, c, k, runtime_library='/dev/null', source=s, "
        "timeout=100), daemon=True)\n"
        "t.start()\n"
        f"while not os.path.exists({str(count)!r}): time.sleep(0.05)\n"
        "os.kill(os.getpid(), 9)\n"
    )
    folder = tmp_path / "tmp"
    folder.mkdir()
    caller = start(code, TMPDIR=folder)
    try:
        # Nobody asks yet how the caller ended: what it leaves must go all the same.
        deadline = time.monotonic() + 60
        while not count.exists() and time.monotonic() < deadline:
            time.sleep(0.01)
        worker = int(count.read_text().split()[0])
        deadline = time.monotonic() + 5
        while time.monotonic() < deadline and (alive(worker) or list(folder.iterdir())):
            time.sleep(0.05)
        assert not alive(worker)
        assert list(folder.iterdir()) == []
    finally:
        caller.kill()
        caller.communicate()


def test_a_daemonic_process_can_compile():
    code = (
        "import multiprocessing\n"
        "def work(queue):\n"
        "    import muse_jit\n    from support import toy\n    from muse_jit.settings import Settings\n"
        "    service = muse_jit.JitService('sm_90a', Settings().with_options(mode='off'))\n"
        "    queue.put(service.get(toy.ToyConstants(value=41))())\n"
        "queue = multiprocessing.Queue()\n"
        "process = multiprocessing.get_context('fork').Process(target=work, args=(queue,), daemon=True)\n"
        "process.start(); print(queue.get(timeout=60)); process.join()"
    )
    assert run(code).strip() == "41"


@pytest.mark.parametrize(
    ("log", "fallback", "expected"),
    [
        ("a\nx.py:3: error: bad operand\nerror: second", "T: m", "x.py:3: error: bad operand"),
        ("no such line", "DSLError: \n💥💥💥\nwhat went wrong\nmore\nthird", "DSLError: what went wrong"),
        ("error:\n", "", "no message"),
    ],
)
def test_first_error(log, fallback, expected):
    assert first_error(log, fallback) == expected


def test_classes_are_named_so_that_the_worker_finds_them():
    assert class_text(toy.ToyConstants) == "support.toy:ToyConstants"
    assert register_kernel("toy", toy.ToyConstants, "support.toy:build").name == "toy"
