"""The load side (reports of kind N): threads, forks, call checks, a missing runtime, machines that only serve."""

import json
import os
import pathlib
import re
import subprocess
import sys
import threading

import pytest
from support import toy
from support.process import ROOT, command, environment, run

from muse_jit.key.encoding import key_digest
from muse_jit.key.toolchain import runtime_library
from muse_jit.loader import kernel
from muse_jit.service import JitService
from muse_jit.settings import Settings
from muse_jit.store.layout import Layout
from muse_jit.store.lookup import Hit, Reason

pytestmark = pytest.mark.processes

HEAVY = ("torch", "tvm_ffi", "cutlass", "cuda")

SERVE = """
import muse_jit
from support import toy
from muse_jit.settings import Settings
constants = toy.ToyConstants(value=5, count_file={count!r})
def service(**options):
    return muse_jit.JitService("sm_90a", Settings().with_options(cache_dir={cache!r}, **options))
"""


@pytest.fixture
def filled(settings, tmp_path):
    """(code that a child begins with, constants) for a cache that holds one kernel."""
    constants = toy.ToyConstants(value=5, count_file=str(tmp_path / "count"))
    assert JitService("sm_90a", settings).obtain(constants).status == "compiled"
    return SERVE.format(cache=settings.cache_dir, count=constants.count_file), constants


def _folder(settings, constants):
    service = JitService("sm_90a", settings)
    return pathlib.Path(service.layout.entry(service.key_of(constants)[1].digest))


# N1: the first call, wherever it is made


def test_n1_the_first_call_may_be_in_any_thread(settings, filled):
    service = JitService("sm_90a", settings.with_options(mode="forbid"))
    results = []
    threads = [threading.Thread(target=lambda: results.append(service.get(filled[1])())) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert results == [5, 5, 5, 5]
    assert service.counters.disk_hits == 1


FORK = """
import os, threading
def child(work):
    reader, writer = os.pipe()
    if os.fork() == 0:
        try:
            os.write(writer, repr(work()).encode())
        finally:
            os._exit(0)
    os.close(writer)
    with os.fdopen(reader) as file:
        text = file.read()
    os.wait()
    return text
def in_thread(work):
    out = []
    thread = threading.Thread(target=lambda: out.append(work()))
    thread.start(); thread.join()
    return out[0]
"""

CALLS = {
    "in a forked child before any use": "print(child(lambda: service(mode='forbid').get(constants)()))",
    "in a forked child after use in the parent": (
        "s = service(mode='forbid'); k = s.get(constants); k()\n"
        "print(child(lambda: (k(), s.get(constants)(), service(mode='forbid').get(constants)())))"
    ),
    "in a child forked after construction": "s = service(mode='forbid')\nprint(child(lambda: s.get(constants)()))",
    "in a child of a child": "print(child(lambda: child(lambda: service(mode='forbid').get(constants)())))",
    "in a thread of a forked child": "print(child(lambda: in_thread(lambda: service(mode='forbid').get(constants)())))",
    "in a child forked from a thread": "print(in_thread(lambda: child(lambda: service().get(constants)())))",
    "in the parent after a child used it": (
        "s = service(mode='forbid'); child(lambda: s.get(constants)()); print(s.get(constants)())"
    ),
    "in an import": (
        "import pathlib, tempfile\nfolder = tempfile.mkdtemp(); sys.path.insert(0, folder); sys.ask = service\n"
        "pathlib.Path(folder, 'asks.py').write_text('import sys\\nfrom support import toy\\n"
        'import __main__\\nprint(sys.ask(mode="forbid").get(__main__.constants)())\\n\')\nimport asks'
    ),
}


@pytest.mark.parametrize("where", CALLS)
def test_n1_the_first_call_from_disk_may_be(filled, tmp_path, where):
    out = run(f"{filled[0]}{FORK}{CALLS[where]}", block=("cutlass",), timeout=60)
    assert set(re.findall(r"\d+", out)) == {"5"}
    assert toy.compiles(tmp_path / "count") == 1


def test_n1_a_kernel_compiled_in_a_forked_child_serves_the_parent(settings, tmp_path):
    constants = toy.ToyConstants(value=5, count_file=str(tmp_path / "count"))
    code = SERVE.format(cache=settings.cache_dir, count=constants.count_file)
    calls = "k = service(); print(child(lambda: k.get(constants)()), k.get(constants)(), k.counters.disk_hits)"
    assert run(f"{code}{FORK}{calls}").split() == ["5", "5", "1"]
    assert toy.compiles(tmp_path / "count") == 1


# N2: what was just compiled and what was loaded take the same calls

ROW_NORM = """
import ctypes, json
import torch
import muse_jit
from muse_jit.constants.row_norm import RowNormConstants
from muse_jit.settings import Settings
constants = RowNormConstants(hidden=64, eps=1e-5, has_weight=True, gain_center=1.0)
settings = Settings().with_options(cache_dir={cache!r}, mode={mode!r})
service = muse_jit.JitService("sm_90a", settings)
function = service.get(constants)


class OnDevice:
    # a host tensor that says it is on a GPU, so that the checks after that of the device are reached
    def __init__(self, tensor):
        self.tensor = tensor

    def __dlpack_device__(self):
        return 2, 0

    def __dlpack__(self, **options):
        capsule = self.tensor.__dlpack__()
        pointer = ctypes.pythonapi.PyCapsule_GetPointer
        pointer.restype, pointer.argtypes = ctypes.c_void_p, (ctypes.py_object, ctypes.c_char_p)
        ctypes.c_int32.from_address(pointer(capsule, b"dltensor") + 8).value = 2  # DLTensor.device.device_type
        return capsule


bf16 = torch.bfloat16
x, w, out = torch.zeros(2, 64, dtype=bf16), torch.zeros(64, dtype=bf16), torch.zeros(2, 64, dtype=bf16)
gx, gw, gout = map(OnDevice, (x, w, out))
calls = {{
    "no argument": (), "one too few": (x, w), "one too many": (x, w, out, out), "number": (3, w, out),
    "none": (gx, None, gout), "text": (gx, gw, "out"), "device": (x, w, out), "device of the weight": (gx, w, gout),
    "dtype": (OnDevice(x.float()), gw, gout), "dtype of the weight": (gx, OnDevice(w.float()), gout),
    "width": (OnDevice(x[:, :32].contiguous()), gw, gout), "rank": (OnDevice(x[0]), gw, gout),
    "rows": (gx, gw, OnDevice(torch.zeros(3, 64, dtype=bf16))),
    "alignment": (OnDevice(torch.zeros(129, dtype=bf16)[1:].view(2, 64)), gw, gout),
    "strides": (OnDevice(torch.zeros(64, 2, dtype=bf16).t()), gw, gout),
}}
answers = {{}}
for name, operands in calls.items():
    try:
        answers[name] = ["returned", repr(function(*operands))]
    except Exception as error:
        answers[name] = [type(error).__name__, str(error)]
print(json.dumps([service.counters.compiled, service.counters.disk_hits, answers]))
"""


WRONG = {
    "no argument": ("TypeError", "Expects 3 parameters"),
    "one too few": ("TypeError", "Expects 3 parameters"),
    "one too many": ("TypeError", "Expects 3 parameters"),
    "number": ("TypeError", "argument #0"),
    "none": ("TypeError", "argument #1"),
    "text": ("TypeError", "argument #2"),
    "device": ("ValueError", "expected device_type=cuda"),
    "device of the weight": ("ValueError", "argument #1"),
    "dtype": ("ValueError", "expected dtype=bfloat16"),
    "dtype of the weight": ("ValueError", "argument #1"),
    "width": ("ValueError", "expected to be 64"),
    "rank": ("ValueError", "expected ndim=2"),
    "rows": ("ValueError", "argument #2"),
    "alignment": ("ValueError", "expected data alignment=16 bytes"),
    "strides": ("ValueError", "argument #0"),
}


def test_n2_a_real_kernel_gives_equal_errors_just_compiled_and_loaded(settings):
    compiled, loaded = (
        json.loads(run(ROW_NORM.format(cache=settings.cache_dir, mode=mode), block=("cutlass",)))
        for mode in ("auto", "forbid")
    )
    assert (compiled[:2], loaded[:2]) == ([1, 0], [0, 1])
    assert compiled[2] == loaded[2]
    assert set(loaded[2]) == set(WRONG)
    for name, (kind, words) in WRONG.items():
        assert loaded[2][name][0] == kind, (name, loaded[2][name])
        assert words in loaded[2][name][1], name


def test_n2_the_toy_takes_the_same_calls_compiled_and_loaded(settings, filled):
    calls = ((), (1,), (1, 2.0, "x", None), ([1],))
    fresh = JitService("sm_90a", settings.with_options(mode="off")).get(filled[1])
    loaded = JitService("sm_90a", settings.with_options(mode="forbid")).get(filled[1])
    assert [fresh(*c) for c in calls] == [loaded(*c) for c in calls] == [5] * len(calls)
    for function in (fresh, loaded):
        with pytest.raises(TypeError):
            function(keyword=1)


# N3: a runtime library that is missing is not the entry's fault


@pytest.mark.parametrize(
    ("make", "error", "words"),
    [
        (lambda path: None, "ToolchainError", "MUSE_JIT_RUNTIME_LIB is {path}, which is not a file"),
        (lambda path: path.write_bytes(b"no library"), "LoadError", "runtime library {path} cannot be opened"),
        (lambda path: path.mkdir(), "ToolchainError", "MUSE_JIT_RUNTIME_LIB is {path}, which is not a file"),
    ],
    ids=["missing", "damaged", "a folder"],
)
def test_n3_a_missing_runtime_is_reported_as_such_and_the_entry_stays(settings, filled, tmp_path, make, error, words):
    path = tmp_path / "libcute_dsl_runtime.so"
    make(path)
    folder = _folder(settings, filled[1])
    inode = folder.stat().st_ino
    code = (
        f"{filled[0]}\n"
        "s = service(runtime_lib={path!r})\n"
        "for _ in range(3):\n"
        "    try:\n"
        "        print(s.get(constants)())\n"
        "    except muse_jit.errors.MuseJitError as error:\n"
        "        print(type(error).__name__, error)\n"
        "print(s.counters.compiled, s.counters.misses)"
    ).replace("{path!r}", repr(str(path)))
    lines = run("import muse_jit.errors\n" + code).splitlines()
    assert len(lines) == 4
    assert set(lines[:3]) == {lines[0]}
    assert lines[0].startswith(f"{error} ")
    assert words.format(path=path) in lines[0]
    assert lines[3] == "0 {}"
    assert toy.compiles(tmp_path / "count") == 1
    assert folder.stat().st_ino == inode
    assert not (pathlib.Path(settings.cache_dir) / "set-aside-v1").exists()
    assert run(f"{filled[0]}print(service(mode='forbid').get(constants)())").strip() == "5"


def test_n3_the_runtime_is_visible_to_the_first_kernel_and_nothing_else_was_loaded_before(filled):
    """A process whose only use of the package is one hit: no compile, no earlier load that opened the runtime."""
    code = (
        f"{filled[0]}\n"
        "maps = lambda: sum('libcute_dsl_runtime.so' in line for line in open('/proc/self/maps'))\n"
        "s = service(mode='forbid'); before = maps(); value = s.get(constants)()\n"
        "print(before, value, maps() > 0)"
    )
    assert run(code, block=("cutlass", "torch")).strip() == "0 5 True"


def test_n3_a_runtime_named_by_the_setting_serves(settings, filled, tmp_path):
    copy = tmp_path / "elsewhere.so"
    copy.write_bytes(pathlib.Path(runtime_library(JitService("sm_90a", settings).target.cuda)).read_bytes())
    code = f"{filled[0]}print(service(mode='forbid', runtime_lib={str(copy)!r}).get(constants)())"
    assert run(code).strip() == "5"


# N4, N6: a machine that only serves

NO_DRIVER = """
import ctypes, os, subprocess
real_library, tried, started = ctypes.CDLL, [], set()
def library(name, *rest, **named):
    if name is not None and "libcuda." in str(name):
        tried.append(name)
        raise OSError(f"{name}: cannot open shared object file")
    return real_library(name, *rest, **named)
ctypes.CDLL = library
class Spy(subprocess.Popen):
    def __init__(self, command, *rest, **named):
        started.add(os.path.basename(command[0]))
        super().__init__(command, *rest, **named)
subprocess.Popen = Spy
"""


def test_n4_a_hit_needs_no_linker_compiler_gpu_or_driver(settings, filled, tmp_path):
    code = NO_DRIVER + filled[0] + "print(service().get(constants)(), service().obtain(constants).status, tried, "
    code += "started - {'ldconfig'})"  # which importing tvm_ffi asks, where cuda-bindings is installed
    out = run(code, block=("cutlass", "torch", "filelock"), PATH=tmp_path, CUDA_VISIBLE_DEVICES="")
    assert out.strip() == "5 hit [] set()"
    assert toy.compiles(tmp_path / "count") == 1


@pytest.mark.parametrize(
    ("program", "arguments"),
    [
        ("muse-cache", ("ls",)),
        ("muse-cache", ("ls", "--json")),
        ("muse-cache", ("show", "{digest}")),
        ("muse-cache", ("path",)),
        ("muse-jit", ("env", "--arch", "sm_90a", "--json")),
        ("muse-jit", ("plan", "--arch", "sm_90a")),
    ],
    ids=str,
)
def test_n4_n6_the_tools_need_none_of_it_either(settings, filled, tmp_path, program, arguments):
    digest = _folder(settings, filled[1]).name
    arguments = [a.format(digest=digest) for a in arguments]
    code, out, err = command(
        program, *arguments, block=(*HEAVY, "subprocess"), PATH=tmp_path, MUSE_JIT_CACHE_DIR=settings.cache_dir
    )
    assert (code, err) == (0, "")
    if program == "muse-cache":
        assert settings.cache_dir in out or digest in out


WITHOUT_DSL = """
import muse_jit.key.installed as installed
import muse_jit.key.toolchain as toolchain
real = installed.distributions
def distributions(prefixes, path=None):
    return {k: v for k, v in real(prefixes, path).items() if not k.startswith(("nvidia-cutlass-dsl", "apache-tvm-ffi"))}
installed.distributions = toolchain.distributions = distributions
"""


def test_n6_the_tools_work_where_neither_dsl_nor_ffi_was_ever_installed(settings, filled, tmp_path):
    digest = _folder(settings, filled[1]).name
    for program, module, arguments, expected in (
        ("muse-cache", "cache_tools.cli", ["show", digest], digest),
        ("muse-cache", "cache_tools.cli", ["ls"], digest[:12]),
        ("muse-jit", "muse_jit.cli", ["env", "--arch", "sm_90a"], "toolchain.json"),
        ("muse-jit", "muse_jit.cli", ["plan", "--arch", "sm_90a"], "row_norm"),
    ):
        code = f"{WITHOUT_DSL}sys.argv[1:] = {arguments!r}\nfrom {module} import entry\nentry()"
        out = run(code, block=HEAVY, MUSE_JIT_CACHE_DIR=settings.cache_dir)
        assert expected in out, program
    empty = run(
        f"{WITHOUT_DSL}sys.argv[1:] = ['env', '--arch', 'sm_90a', '--json']\nfrom muse_jit.cli import entry\nentry()",
        block=HEAVY,
        MUSE_JIT_CACHE_DIR=tmp_path / "empty",
    )
    document = json.loads(empty)
    assert document["toolchain"]["digest"] is None
    assert "no compiler is installed" in document["toolchain"]["origin"]
    assert not (tmp_path / "empty").exists()


def test_n6_a_warmup_where_nothing_is_installed_is_one_line(tmp_path):
    code = f"{WITHOUT_DSL}sys.argv[1:] = ['warmup', '--arch', 'sm_90a']\nfrom muse_jit.cli import entry\nentry()"
    done = subprocess.run(
        [sys.executable, "-c", f"import sys\n{code}"],
        capture_output=True,
        text=True,
        cwd=ROOT,
        env=environment(MUSE_JIT_CACHE_DIR=tmp_path / "cache"),
    )
    assert (done.returncode, done.stdout) == (3, "")
    assert done.stderr.startswith("muse-jit: no compiler is installed")
    assert done.stderr.count("\n") == 1


# N5: an entry of another architecture


def _forge(folder, **target):
    """Change the target in an entry's stored key, its digest with it; returns the digest it then claims."""
    path = folder / "entry.json"
    document = json.loads(path.read_text())
    document["key"]["target"].update(target)
    document["digest"] = key_digest(document["key"])
    path.write_text(json.dumps(document))
    return document["digest"]


@pytest.mark.parametrize("target", [{"host": "aarch64"}, {"arch": "sm_100a"}, {"arch": "sm_90"}, {"cuda": 12}])
def test_n5_an_entry_of_another_target_is_refused_before_it_is_opened(settings, filled, tmp_path, monkeypatch, target):
    _forge(_folder(settings, filled[1]), **target)
    service = JitService("sm_90a", settings)
    found = service.find(filled[1])
    assert found.reason == Reason.FOREIGN_KEY
    opened, real = [], kernel._open
    monkeypatch.setattr(kernel, "_open", lambda artifact, name: opened.append(artifact) or real(artifact, name))
    assert service.get(filled[1])() == 5
    assert len(opened) == 1
    assert toy.compiles(tmp_path / "count") == 2
    assert isinstance(JitService("sm_90a", settings).find(filled[1]), Hit)


@pytest.mark.parametrize(("field", "value"), [("host", "aarch64"), ("arch", "sm_100a")])
def test_n5_the_refusal_names_the_other_architecture(settings, filled, field, value):
    _forge(_folder(settings, filled[1]), **{field: value})
    assert value in JitService("sm_90a", settings).find(filled[1]).detail


def test_n5_another_host_architecture_has_a_key_of_its_own(settings, filled, monkeypatch):
    """The same folder on an aarch64 host: nothing of the x86-64 entry is found, and nothing of it is touched."""
    here = JitService("sm_90a", settings)
    monkeypatch.setattr("muse_jit.service.host_arch", lambda: "aarch64" if here.target.host == "x86_64" else "x86_64")
    other = JitService("sm_90a", settings)
    assert other.target.host != here.target.host
    assert other.find(filled[1]).reason == Reason.ABSENT
    assert isinstance(here.find(filled[1]), Hit)


def test_n5_a_device_of_another_capability_gets_its_own_service():
    """Runtime objects ask by the operand's device, so a sibling's kernel is never the one that is asked for."""
    from muse_jit.ops import device

    capabilities = {0: (9, 0), 1: (10, 0), 2: (9, 0)}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(device.torch.cuda, "get_device_capability", lambda d: capabilities[d.index])
        patch.setattr(device, "JitService", lambda arch: JitService(arch, Settings()))
        device._service.cache_clear()
        services = [device.service_for(device.torch.device("cuda", index)) for index in capabilities]
        device._service.cache_clear()
    assert [s.target.arch for s in services] == ["sm_90a", "sm_100a", "sm_90a"]
    assert services[0] is services[2]


def test_n5_the_layout_keeps_architectures_apart_by_digest_alone(settings, filled):
    """No folder name carries an architecture that could be trusted instead of the stored key."""
    service = JitService("sm_90a", settings)
    place = Layout(settings.cache_dir).entry(service.key_of(filled[1])[1].digest)
    assert "sm_" not in os.path.relpath(place, settings.cache_dir)
