"""Damaged entries and strange cache folders (reports of kind C): a miss with its reason, one rebuild, no crash.

Most tests ask a real compiler once for each kernel and hand its bytes out again: what is counted is how often the
service asked.
"""

import json
import logging
import os
import pathlib
import shutil
import sys

import pytest
from hypothesis import HealthCheck, given
from hypothesis import settings as hypothesis_settings
from hypothesis import strategies as st
from support import toy
from support.entries import ARTIFACT, entry, key
from support.process import command, run

import cache_tools.cli
import muse_jit.cli
from muse_jit import console
from muse_jit.compiler import build as build_module
from muse_jit.errors import CompileError, ToolchainError
from muse_jit.key import toolchain as toolchain_module
from muse_jit.key.encoding import content_digest, key_digest
from muse_jit.service import JitService
from muse_jit.settings import Settings
from muse_jit.store import lookup
from muse_jit.store.entry import Entry
from muse_jit.store.layout import Layout
from muse_jit.store.listing import listed
from muse_jit.store.lock import describe_holder
from muse_jit.store.lookup import Hit, Miss, Reason, find, read_manifest
from muse_jit.store.publish import publish, set_aside

pytestmark = pytest.mark.processes

CONSTANTS = toy.ToyConstants(value=5)


_built = {}
_real_build = build_module.build


class Compiler:
    """How often the service asked for a compile; `before` is called at each."""

    def __init__(self):
        self.asked = 0
        self.before = None

    def __call__(self, family, constants, key, **options):
        self.asked += 1
        if self.before is not None:
            self.before()
        if key.digest not in _built:
            _built[key.digest] = _real_build(family, constants, key, **options)
        return _built[key.digest]


@pytest.fixture
def compiler(monkeypatch):
    compiler = Compiler()
    monkeypatch.setattr(build_module, "build", compiler)
    return compiler


@pytest.fixture
def cache(tmp_path, compiler):
    """A cache that holds the toy kernel; the count of compiles starts after it."""
    root = tmp_path / "cache"
    _service(root).obtain(CONSTANTS)
    compiler.asked = 0
    return root


def _service(root, **options):
    return JitService("sm_90a", Settings().with_options(cache_dir=str(root), **options))


def _digest():
    return _service("/nowhere").key_of(CONSTANTS)[1].digest


def _folder(root):
    return pathlib.Path(Layout(str(root)).entry(_digest()))


def _aside(root):
    return sorted(pathlib.Path(root, "set-aside-v1").glob("*"))


def _edit(root, **fields):
    path = _folder(root) / "entry.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **fields}))


def _rekey(root, **parts):
    """A second entry, whole in itself, whose key document has other parts; returns its digest."""
    document = json.loads((_folder(root) / "entry.json").read_text())
    document["key"].update(parts)
    document["digest"] = key_digest(document["key"])
    target = pathlib.Path(Layout(str(root)).entry(document["digest"]))
    target.parent.mkdir(mode=0o700, exist_ok=True)
    shutil.copytree(_folder(root), target)
    (target / "entry.json").write_text(json.dumps(document))
    return document["digest"]


def _remove(path):
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)


def _file(path, data=b"stray"):
    _remove(path)
    path.write_bytes(data)


def _link(path):
    _remove(path)
    path.symlink_to("/nowhere/else")


def _directory(path):
    _remove(path)
    path.mkdir()
    (path / "stray").write_text("x")


def _pipe(path):
    _remove(path)
    os.mkfifo(path)


def _nested(depth):
    return b"[" * depth + b"]" * depth


def _lock(root):
    return pathlib.Path(Layout(str(root)).lock(_digest()))


def _cut(root):
    (_folder(root) / "kernel.so").write_bytes(b"\x7fELF")


def _strays(root):
    for place in ("", "entries-v1", f"entries-v1/{_digest()[:2]}", "locks-v1", "staging-v1", "toolchain.json.d"):
        (root / place).mkdir(exist_ok=True)
        for number in range(300):
            (root / place / f"stray-{number}").write_text("x")
        os.mkdir(os.fsencode(root / place) + b"/\xff\xfe")


# State → (what makes it, what the service does).
#   hit      the entry is found
#   rebuilt  compiled once, then found
#   memory   compiled at every start, used from memory, with a warning
STATES = {
    **{
        f"{name} is {what.__name__[1:]}": (lambda root, name=name, what=what: what(root / name), outcome)
        for names, outcome in (
            (("entries-v1",), "memory"),
            (("locks-v1", "staging-v1", "set-aside-v1"), "hit"),
            (("README", "CACHEDIR.TAG"), "hit"),
        )
        for name in names
        for what in (_file, _link, *((_directory,) if names[0] == "README" else ()))
    },
    "the root is a file": (_file, "memory"),
    "the root is a link to nowhere": (_link, "memory"),
    "the root is missing": (_remove, "rebuilt"),
    "the root is empty": (lambda root: (_remove(root), root.mkdir(mode=0o700)), "rebuilt"),
    "the root is another user's": (lambda root: os.chown(root, 54321, 54321), "memory"),
    "the root is everybody's": (lambda root: root.chmod(0o777), "memory"),
    "the shard is a file": (lambda root: _file(_folder(root).parent), "memory"),
    "the shard is a link": (lambda root: _link(_folder(root).parent), "memory"),
    "the entry is a file": (lambda root: _file(_folder(root)), "rebuilt"),
    "the entry is a link": (lambda root: _link(_folder(root)), "rebuilt"),
    "the entry is a link to itself moved": (
        lambda root: (_folder(root).rename(root / "moved"), _folder(root).symlink_to(root / "moved")),
        "rebuilt",
    ),
    "the entry is empty": (lambda root: (_remove(_folder(root)), _folder(root).mkdir()), "rebuilt"),
    **{
        f"{name} is {what.__name__[1:]}": (lambda root, name=name, what=what: what(_folder(root) / name), "rebuilt")
        for name in ("kernel.so", "entry.json")
        for what in (_link, _directory, _pipe)
    },
    **{
        f"{name} is huge": (lambda root, name=name: os.truncate(_folder(root) / name, 1 << 40), "rebuilt")
        for name in ("kernel.so", "entry.json")
    },
    **{
        f"{name} is another user's": (lambda root, name=name: os.chown(_folder(root) / name, 54321, 54321), "rebuilt")
        for name in ("kernel.so", "entry.json")
    },
    "a manifest of deep JSON": (lambda root: _file(_folder(root) / "entry.json", _nested(100_000)), "rebuilt"),
    "a manifest with a deep schema": (
        lambda root: _file(_folder(root) / "entry.json", b'{"schema": ' + _nested(900) + b"}"),
        "rebuilt",
    ),
    "a manifest that is not UTF-8": (lambda root: _file(_folder(root) / "entry.json", b'{"\xff\xfe": 1}'), "rebuilt"),
    "a manifest with a huge number": (
        lambda root: _file(_folder(root) / "entry.json", b'{"schema": 1, "artifact_size": ' + b"9" * 5000 + b"}"),
        "rebuilt",
    ),
    "a manifest of 8 MB": (lambda root: _file(_folder(root) / "entry.json", b"[" + b"0," * 4_000_000), "rebuilt"),
    "thousands of strays": (_strays, "hit"),
    "damage, and locks-v1 is a file": (lambda root: (_cut(root), _file(root / "locks-v1")), "rebuilt"),
    "damage, and the lock is a folder": (lambda root: (_cut(root), _directory(_lock(root))), "rebuilt"),
    "damage, and the lock is a link": (lambda root: (_cut(root), _link(_lock(root))), "rebuilt"),
    "damage, and the lock is a pipe": (lambda root: (_cut(root), _pipe(_lock(root))), "rebuilt"),
    "damage, and garbage in the lock": (lambda root: (_cut(root), _file(_lock(root), b"\xff" * 9000)), "rebuilt"),
    "damage, and staging-v1 is a file": (lambda root: (_cut(root), _file(root / "staging-v1")), "memory"),
    "damage, and set-aside-v1 is a file": (lambda root: (_cut(root), _file(root / "set-aside-v1")), "memory"),
    "damage, and README is a folder": (lambda root: (_cut(root), _directory(root / "README")), "rebuilt"),
}


def _states():
    """Parameters for each state."""
    needs_root = pytest.mark.skipif(os.geteuid() != 0, reason="needs root to give files away")
    return [pytest.param(name, marks=[needs_root] * ("another user's" in name)) for name in STATES]


@pytest.mark.parametrize("name", _states())
@pytest.mark.parametrize("ask", ["get", "obtain"])
def test_c2_any_state_of_the_folder_gives_the_kernel(cache, compiler, caplog, name, ask):
    make, outcome = STATES[name]
    make(cache)
    asked = []
    for start in range(3):
        before = compiler.asked
        with caplog.at_level(logging.WARNING, "muse_jit"):
            caplog.clear()
            service = _service(cache)
            if ask == "get":
                assert service.get(CONSTANTS)() == 5
            else:
                stored = service.obtain(CONSTANTS)
                assert stored.hit.artifact.startswith(b"\x7fELF")
                assert bool(stored.not_stored) == (outcome == "memory")
        asked.append(compiler.asked - before)
        if outcome == "memory":
            assert "kernels are used from memory" in caplog.text
        if outcome == "hit" or (start > 0 and outcome == "rebuilt"):
            assert caplog.records == []
    assert asked == {"hit": [0, 0, 0], "rebuilt": [1, 0, 0], "memory": [1, 1, 1]}[outcome]


def _cli(monkeypatch, capfd, cache, program, *arguments):
    """Run a command in this process up to its exit: (code, standard output, standard error)."""
    main = {"muse-jit": muse_jit.cli.main, "muse-cache": cache_tools.cli.main}[program]
    monkeypatch.setenv("MUSE_JIT_CACHE_DIR", str(cache))
    monkeypatch.setattr(sys, "argv", [program, *map(str, arguments)])
    capfd.readouterr()
    code = console._run(main, program)
    out, err = capfd.readouterr()
    if code in (2, 3):
        assert out == ""
        assert err.startswith(f"{program}: ")
        assert err.count("\n") == 1
    return code, out, err


def _plan(tmp_path):
    path = tmp_path / "plan.json"
    kernels = [{"kernel": "toy", "arch": "sm_90a", "constants": CONSTANTS.as_dict()}]
    path.write_text(json.dumps({"schema": 1, "kernels": kernels}))
    return path


@pytest.mark.parametrize("name", _states())
def test_c2_any_state_of_the_folder_gives_a_documented_exit_code(cache, compiler, tmp_path, monkeypatch, capfd, name):
    make, outcome = STATES[name]
    make(cache)
    no_folder = not cache.is_dir()
    for extra in ((), ("--json",)):
        code, out, _ = _cli(monkeypatch, capfd, cache, "muse-jit", "env", "--arch", "sm_90a", *extra)
        assert code == 0
        assert str(cache) in out
        code, out, _ = _cli(monkeypatch, capfd, cache, "muse-cache", "path", *extra)
        assert code == 0
        assert str(cache) in out
        code, out, _ = _cli(monkeypatch, capfd, cache, "muse-cache", "ls", *extra)
        assert code == (3 if no_folder else 0)
        code, out, err = _cli(monkeypatch, capfd, cache, "muse-cache", "show", _digest(), *extra)
        assert code == 3 if no_folder else code in (0, 1, 2)
        if code == 2:
            assert "no entry's digest begins with" in err
        if extra and code in (0, 1):
            assert json.loads(out)["digest"] == _digest()
    code, out, err = _cli(monkeypatch, capfd, cache, "muse-jit", "warmup", "--plan", _plan(tmp_path), "--json")
    if code == 3:
        assert no_folder or "the root is" in name
        return
    report = json.loads(out)
    assert code == (1 if report["not_stored"] else 0)
    assert report["not_stored"] == (1 if outcome == "memory" else 0)
    assert report["hits"] == (1 if outcome == "hit" else 0)


def test_c2_the_zoo_in_real_processes(cache):
    """The edge of the commands themselves: no traceback reaches standard error."""
    _file(_folder(cache) / "entry.json", _nested(100_000))
    _directory(cache / "toolchain.json")
    for program, arguments, expected in (
        ("muse-cache", ("ls",), 0),
        ("muse-cache", ("show", _digest()), 1),
        ("muse-cache", ("path",), 0),
        ("muse-jit", ("env", "--arch", "sm_90a"), 0),
    ):
        code, out, err = command(program, *arguments, "--cache-dir", cache)
        assert (code, err) == (expected, "")
        assert out


SHOWN = {
    "created is no number": {"created": float("nan")},
    "created is infinite": {"created": float("inf")},
    "times are no numbers": {"compile_seconds": float("nan")},
    "resources are numbers": {"resources": [3]},
    "resources are lists": {"resources": [[[]]]},
    "a resource's fields are odd": {"resources": [{"name": [1], "registers": {}}]},
    "control characters": {"created_by": "\x1b[31m\n\udc80", "symbol": "\0"},
    "sizes are absurd": {"artifact_size": -1, "created": 1e300, "compile_seconds": -1e300},
}


@pytest.mark.parametrize("name", SHOWN)
def test_c2_a_manifest_with_absurd_values_is_listed_and_shown(cache, monkeypatch, capfd, name):
    _edit(cache, **SHOWN[name])
    for arguments in (("ls",), ("ls", "--json"), ("show", _digest()), ("show", _digest(), "--json")):
        code, out, err = _cli(monkeypatch, capfd, cache, "muse-cache", *arguments)
        assert code in (0, 1)
        assert "\x1b" not in out
        assert err == ""
        if "--json" in arguments:
            json.loads(out)


@pytest.mark.parametrize(
    "parts",
    [
        {"constants": [1]},
        {"toolchain": "text"},
        {"options": 3},
        {"kernel": None},
        {"target": {"arch": None}},
        {"constants": None, "toolchain": None, "options": None, "source": []},
    ],
    ids=lambda parts: "-".join(parts),
)
def test_c2_a_key_of_another_form_is_listed_and_shown(cache, monkeypatch, capfd, parts):
    digest = _rekey(cache, **parts)
    for arguments in (("ls",), ("ls", "--json"), ("show", digest), ("show", digest, "--json")):
        code, out, _ = _cli(monkeypatch, capfd, cache, "muse-cache", *arguments)
        assert code in (0, 1)
        assert digest[:12] in out


@pytest.mark.parametrize(
    "symbol",
    ["other", "", "\0", "x" * 5000, "\ud800"],
    ids=["other", "empty", "nul", "long", "surrogate"],
)
def test_c1_an_entry_with_a_wrong_symbol_is_rebuilt_in_the_same_run(cache, compiler, symbol):
    _edit(cache, symbol=symbol)
    assert _service(cache).get(CONSTANTS)() == 5
    assert compiler.asked == 1
    assert _service(cache).get(CONSTANTS)() == 5
    assert compiler.asked == 1


def test_c1_an_entry_with_a_wrong_symbol_is_no_hit(cache):
    _edit(cache, symbol="other")
    assert isinstance(_service(cache).find(CONSTANTS), Miss)


def _unloadable(root):
    data = b"not a library"
    _edit(root, artifact_digest=content_digest(data), artifact_size=len(data))
    (_folder(root) / "kernel.so").write_bytes(data)


@pytest.mark.parametrize("why", ["readonly", "set-aside-v1 is a file"])
def test_c1_an_entry_that_cannot_be_opened_and_not_be_moved_costs_a_compile_not_the_start(cache, compiler, why):
    _unloadable(cache)
    if why != "readonly":
        _file(cache / "set-aside-v1")
    assert _service(cache, mode="readonly" if why == "readonly" else "auto").get(CONSTANTS)() == 5
    assert compiler.asked == 1


# toolchain.json


@pytest.fixture
def no_compiler(monkeypatch):
    monkeypatch.setattr(toolchain_module, "installed_cuda_majors", lambda path=None: ())


def test_c3_toolchain_json_cut_at_any_length_never_fails_a_start(cache, compiler):
    path = cache / "toolchain.json"
    whole = path.read_bytes()
    for length in range(0, len(whole), 7):
        path.write_bytes(whole[:length])
        assert _service(cache).get(CONSTANTS)() == 5
    assert compiler.asked == 0


def test_c3_toolchain_json_cut_at_any_length_is_one_line_where_no_compiler_is(cache, compiler, no_compiler):
    path = cache / "toolchain.json"
    whole = path.read_bytes()
    for length in [*range(0, len(whole) - 2, 7), len(whole) - 2]:
        path.write_bytes(whole[:length])
        with pytest.raises(ToolchainError, match="no compiler is installed") as caught:
            _service(cache)
        assert "\n" not in str(caught.value)
    path.write_bytes(whole)
    assert _service(cache).get(CONSTANTS)() == 5
    assert compiler.asked == 0


@pytest.mark.parametrize(
    "change",
    [
        {"cuda": 14},
        {"parts": {"x": float("nan")}},
        {"parts": {"x": "\ud800"}},
        {"parts": {"x": 1}},
        {"recorded": "soon"},
        {"host": "riscv64"},
        {"parts": None},
    ],
    ids=str,
)
def test_c2_a_newer_record_that_makes_no_sense_hides_no_good_one(cache, compiler, no_compiler, change):
    path = cache / "toolchain.json"
    document = json.loads(path.read_text())
    record = document["toolchains"][0]
    if isinstance(change.get("parts"), dict):
        change = {"parts": {**record["parts"], **change["parts"]}}
    document["toolchains"].append({**record, "recorded": record["recorded"] + 1e6, **change})
    path.write_text(json.dumps(document))
    assert _service(cache).get(CONSTANTS)() == 5
    assert compiler.asked == 0


@pytest.mark.parametrize("what", [_link, _directory, _pipe])
def test_c2_toolchain_json_of_a_wrong_kind_harms_no_hit(cache, what):
    what(cache / "toolchain.json")
    code = (
        "import muse_jit\nfrom support import toy\nfrom muse_jit.settings import Settings\n"
        f"s = muse_jit.JitService('sm_90a', Settings().with_options(cache_dir={str(cache)!r}, mode='forbid'))\n"
        "print(s.get(toy.ToyConstants(value=5))())"
    )
    assert run(f"import signal\nsignal.alarm(10)\n{code}").strip() == "5"


def test_c2_a_huge_toolchain_json_harms_no_hit(cache):
    os.truncate(cache / "toolchain.json", 1 << 36)
    code = (
        "import resource\nresource.setrlimit(resource.RLIMIT_AS, (4 << 30, 4 << 30))\n"
        "import muse_jit\nfrom support import toy\nfrom muse_jit.settings import Settings\n"
        f"s = muse_jit.JitService('sm_90a', Settings().with_options(cache_dir={str(cache)!r}, mode='forbid'))\n"
        "print(s.get(toy.ToyConstants(value=5))())"
    )
    assert run(code).strip() == "5"


@pytest.mark.parametrize("trouble", ["toolchain.json is a folder", "locks-v1 is a file"])
def test_c2_trouble_after_publishing_does_not_make_a_stored_kernel_not_stored(tmp_path, compiler, trouble):
    root = tmp_path / "cache"
    root.mkdir(mode=0o700)
    if trouble == "locks-v1 is a file":
        _file(root / "locks-v1")
    else:
        _directory(root / "toolchain.json")
    stored = _service(root).obtain(CONSTANTS)
    assert isinstance(_service(root).find(CONSTANTS), Hit)
    assert stored.not_stored == ""


@pytest.mark.parametrize(
    "text",
    [
        b"[" * 4096,
        pytest.param(b'{"pid": 1, "host": "a", "what": "b", "since": 1e300}', id="far"),
        b"\xff\xfe",
        b"[]",
        b"null",
        b"",
    ],
)
def test_c2_garbage_in_a_holders_record_is_another_process(tmp_path, text):
    path = tmp_path / "x.lock"
    path.write_bytes(text)
    assert describe_holder(str(path)) == "another process"


UNREADABLE = """
import ctypes, os, sys
if os.geteuid() == 0 and "again" not in sys.argv:
    for capability in (1, 2):  # CAP_DAC_OVERRIDE, CAP_DAC_READ_SEARCH: modes count for root too
        assert ctypes.CDLL(None).prctl(24, capability, 0, 0, 0) == 0
    os.execv(sys.executable, [sys.executable, "-c", {code!r}, "again"])
exec({code!r})
"""

UNREADABLE_CODE = """
import logging, os, pathlib
import muse_jit
from support import toy
from muse_jit.settings import Settings
from muse_jit.store.lookup import Miss
logging.getLogger("muse_jit").addHandler(logging.NullHandler())
root = pathlib.Path({root!r})
for place in [root, root / "entries-v1", *root.glob("entries-v1/*"), *root.glob("entries-v1/*/*"),
              *root.glob("entries-v1/*/*/*"), root / "locks-v1", root / "toolchain.json"]:
    for mode in (0o000, 0o500, 0o300):
        old = place.stat().st_mode
        place.chmod(mode)
        try:
            service = muse_jit.JitService("sm_90a", Settings().with_options(cache_dir=str(root), mode="readonly"))
            found = service.find(toy.ToyConstants(value=5))
            print(place.relative_to(root).parts[:1], place.name[-11:], oct(mode),
                  found.reason if isinstance(found, Miss) else "hit")
        finally:
            place.chmod(old)
"""


def test_c2_modes_that_forbid_reading_are_a_miss_never_an_error(cache):
    out = run(UNREADABLE.format(code=UNREADABLE_CODE.format(root=str(cache))))
    lines = out.splitlines()
    assert len(lines) == 8 * 3
    assert {line.split()[-1] for line in lines} == {"hit", "unreadable"}
    assert sum("kernel.so" in line and "unreadable" in line for line in lines) == 2  # modes 000 and 300
    assert [line.split()[-1] for line in lines if "locks-v1" in line or "toolchain.json" in line] == ["hit"] * 6


# Truncation, lost pages, lost files


def _lengths(size):
    near = {*range(9), size // 3, size // 2, size - 1, size - 2, 63, 64, 65, 511, 512, 4095, 4096, 4097}
    return sorted(length for length in near | set(range(0, size, max(size // 8, 1))) if 0 <= length < size)


@pytest.mark.parametrize("name", ["kernel.so", "entry.json"])
def test_c3_a_file_cut_at_any_length_is_a_miss_rebuilt_once_and_then_a_hit(cache, compiler, name):
    path = _folder(cache) / name
    reasons = {"kernel.so": {"truncated"}, "entry.json": {"bad_manifest"}}[name]
    newline = 1 if name == "entry.json" else 0  # the last byte of a manifest says nothing
    for turn, length in enumerate(_lengths(path.stat().st_size), 1):
        # Each rebuilt manifest has times of its own, so its size differs by a digit or two.
        os.truncate(path, min(length, path.stat().st_size - 1 - newline))
        service = _service(cache)
        assert service.get(CONSTANTS)() == 5
        assert compiler.asked == turn
        assert set(service.counters.misses) == reasons
        assert isinstance(_service(cache).find(CONSTANTS), Hit)
        assert len(_aside(cache)) == turn


def test_c3_look_up_at_every_length_of_every_file(cache):
    service = _service(cache)
    good = service.find(CONSTANTS)
    for name in ("kernel.so", "entry.json"):
        path = _folder(cache) / name
        whole = path.read_bytes()
        for length in range(0, len(whole), 1 if name == "entry.json" else 37):
            path.write_bytes(whole[:length])
            found = service.find(CONSTANTS)
            if name == "entry.json" and length == len(whole) - 1:  # all but the last newline says the same
                assert found.artifact == good.artifact
            else:
                assert isinstance(found, Miss), (name, length)
        path.write_bytes(whole)
    again = service.find(CONSTANTS)
    assert (again.entry, again.artifact, again.inode) == (good.entry, good.artifact, good.inode)


@pytest.mark.parametrize(
    "damage",
    [
        lambda folder: (folder / "kernel.so").unlink(),
        lambda folder: (folder / "kernel.so").write_bytes(b""),
        lambda folder: (folder / "kernel.so").write_bytes(bytes((folder / "kernel.so").stat().st_size)),
        lambda folder: (folder / "entry.json").unlink(),
        lambda folder: (folder / "entry.json").write_bytes(bytes((folder / "entry.json").stat().st_size)),
        lambda folder: [(folder / name).unlink() for name in ("entry.json", "kernel.so")],
    ],
    ids=["artifact gone", "artifact empty", "artifact zeros", "manifest gone", "manifest zeros", "both gone"],
)
def test_c10_what_a_power_loss_leaves_is_a_miss_and_rebuilt_once(cache, compiler, damage):
    damage(_folder(cache))
    assert isinstance(_service(cache).find(CONSTANTS), Miss)
    assert [_service(cache).get(CONSTANTS)() for _ in range(3)] == [5, 5, 5]
    assert compiler.asked == 1
    assert len(_aside(cache)) == 1


def test_c3_truncations_with_the_real_compiler(tmp_path):
    """The same without the stand-in for the compiler, counted where the toy is built."""
    count = tmp_path / "count"
    constants = toy.ToyConstants(value=6, count_file=str(count))
    root = tmp_path / "cache"
    service = _service(root)
    service.get(constants)
    folder = pathlib.Path(service.layout.entry(service.key_of(constants)[1].digest))
    for turn, name in enumerate(("kernel.so", "entry.json"), 2):
        os.truncate(folder / name, 100)
        assert _service(root).get(constants)() == 6
        assert _service(root).get(constants)() == 6
        assert toy.compiles(count) == turn


# Any bytes at all

_POSITION = st.floats(0, 1, exclude_max=True)
DAMAGE = st.lists(
    st.tuples(st.sampled_from(["flip", "set", "cut", "insert", "zero", "repeat"]), _POSITION, st.binary(max_size=40)),
    min_size=1,
    max_size=4,
)


def _damaged(data, operations):
    for operation, place, payload in operations:
        at = int(place * len(data)) if data else 0
        size = len(payload)
        if operation == "flip" and data:
            bit = 1 << (size % 8)
            data = data[:at] + bytes([data[at] ^ bit]) + data[at + 1 :]
        elif operation == "set":
            data = data[:at] + payload + data[at + size :]
        elif operation == "cut":
            data = data[:at] + data[at + size :]
        elif operation == "insert":
            data = data[:at] + payload + data[at:]
        elif operation == "zero":
            data = data[:at] + bytes(min(size, len(data) - at)) + data[at + size :]
        elif operation == "repeat":
            data = data[:at] + data[max(at - size, 0) : at] + data[at:]
    return data


@hypothesis_settings(
    max_examples=400, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture], derandomize=True
)
@given(st.sampled_from(["kernel.so", "entry.json", "both", "swapped"]), DAMAGE, DAMAGE)
def test_c4_random_damage_gives_the_published_bytes_or_a_miss(tmp_path, which, first, second):
    layout = Layout(str(tmp_path / "cache"))
    folder = pathlib.Path(layout.entry(key().digest))
    if not folder.exists():
        publish(layout, entry(), ARTIFACT)
    artifact, manifest = ARTIFACT, entry().to_json()
    if which == "swapped":
        artifact, manifest = manifest, artifact
    if which in ("kernel.so", "both"):
        artifact = _damaged(artifact, first)
    if which in ("entry.json", "both"):
        manifest = _damaged(manifest, second)
    (folder / "kernel.so").write_bytes(artifact)
    (folder / "entry.json").write_bytes(manifest)
    found = find(layout, key())
    if isinstance(found, Hit):
        assert found.artifact == ARTIFACT
        assert found.entry.key == key().document
        assert found.entry.artifact_digest == content_digest(ARTIFACT)
    else:
        assert isinstance(found, Miss)
        assert found.detail
        assert found.inode == folder.stat().st_ino
    assert isinstance(read_manifest(layout, key().digest), Miss) or which in ("kernel.so", "entry.json", "both")


def test_c4_one_flipped_bit_anywhere_in_the_library_is_caught(cache):
    service = _service(cache)
    path = _folder(cache) / "kernel.so"
    whole = path.read_bytes()
    for at in range(0, len(whole), 61):
        path.write_bytes(whole[:at] + bytes([whole[at] ^ (1 << at % 8)]) + whole[at + 1 :])
        assert service.find(CONSTANTS).reason == Reason.BAD_DIGEST
    path.write_bytes(whole)
    assert isinstance(service.find(CONSTANTS), Hit)


def test_c5_without_a_compiler_a_stack_with_another_runtime_library_is_not_taken_for_this_one(
    cache, compiler, no_compiler
):
    path = cache / "toolchain.json"
    document = json.loads(path.read_text())
    record = document["toolchains"][0]
    flavour = f"nvidia-cutlass-dsl-libs-cu{record['cuda']}"
    parts = {**record["parts"], flavour: {**record["parts"][flavour], "version": "9.9", "runtime": "sha256=other"}}
    newer = {**record, "parts": parts, "digest": key_digest(parts), "recorded": record["recorded"] + 1.0}
    path.write_text(json.dumps({**document, "toolchains": [record, newer]}))
    service = _service(cache)
    assert service.toolchain.parts == record["parts"]
    assert service.get(CONSTANTS)() == 5
    assert compiler.asked == 0


# Another stack's entry, strays, set-aside, failed compiles


def test_c5_an_entry_of_another_stack_in_this_ones_place_is_never_loaded(cache, compiler):
    service = _service(cache)
    _, asked_key = service.key_of(CONSTANTS)
    other = dict(asked_key.toolchain, tvm_ffi_abi="0.0/other stack")
    moved = pathlib.Path(service.layout.entry(_rekey(cache, toolchain=other)))
    for forge, reason in ((False, Reason.FOREIGN_KEY), (True, Reason.BAD_MANIFEST)):
        document = json.loads((moved / "entry.json").read_text())
        document["digest"] = asked_key.digest if forge else document["digest"]
        _file(_folder(cache) / "entry.json", json.dumps(document).encode())
        assert service.find(CONSTANTS).reason == reason
        asked = compiler.asked
        assert _service(cache).get(CONSTANTS)() == 5
        assert compiler.asked == asked + 1
    assert (moved / "kernel.so").exists()


def test_c6_strays_and_half_entries_block_neither_writing_nor_listing(cache, compiler):
    _strays(cache)
    other = toy.ToyConstants(value=8)
    service = _service(cache)
    digest = service.key_of(other)[1].digest
    shard = cache / "entries-v1" / digest[:2]
    half = shard / (digest[:2] + "0" * 62)
    half.mkdir(parents=True)
    (half / "kernel.so").write_bytes(b"half")
    (cache / "staging-v1" / ("a" * 32)).mkdir()
    (cache / "set-aside-v1" / "something").mkdir(parents=True)
    assert service.obtain(other).not_stored == ""
    assert isinstance(_service(cache).find(other), Hit)
    items = {item.digest: item.entry for item in listed(service.layout)}
    assert set(items) == {_digest(), digest, half.name}
    assert items[half.name].reason == Reason.INCOMPLETE
    assert compiler.asked == 1
    assert (half / "kernel.so").read_bytes() == b"half"


def test_c8_a_builder_that_found_damage_leaves_the_entry_of_a_faster_one(cache, compiler):
    """Without locks two processes repair at once: the slower one must not move the whole entry away."""
    _cut(cache)
    _file(cache / "locks-v1")
    inodes = []

    def faster():
        compiler.before = None
        _service(cache).obtain(CONSTANTS)
        inodes.append(_folder(cache).stat().st_ino)

    compiler.before = faster
    assert _service(cache).get(CONSTANTS)() == 5
    assert compiler.asked == 2
    assert _folder(cache).stat().st_ino == inodes[0]
    assert len(_aside(cache)) == 1
    assert (_aside(cache)[0] / "kernel.so").read_bytes() == b"\x7fELF"


def test_c8_a_reader_that_is_half_way_gets_one_build_whole(cache, monkeypatch):
    """Between its two files the entry is set aside and another takes the name."""
    service = _service(cache)
    good = service.find(CONSTANTS)
    real = lookup._bytes_of
    other = {"artifact_digest": content_digest(b"another build"), "artifact_size": 13}

    def reading(folder, name):
        data = real(folder, name)
        if name == "entry.json" and not _aside(cache):
            assert set_aside(service.layout, _digest(), Miss(Reason.BAD_DIGEST, "", good.inode)) is not None
            manifest = json.dumps({**json.loads(data), **other}).encode()
            publish(service.layout, Entry.from_json(manifest), b"another build")
        return data

    monkeypatch.setattr(lookup, "_bytes_of", reading)
    found = service.find(CONSTANTS)
    assert (found.artifact, found.inode) == (good.artifact, good.inode)
    assert service.find(CONSTANTS).artifact == b"another build"


def test_c8_a_kernel_in_use_survives_that_its_entry_is_set_aside(cache):
    service = _service(cache)
    kernel = service.get(CONSTANTS)
    assert set_aside(service.layout, _digest(), Miss(Reason.BAD_DIGEST, "", _folder(cache).stat().st_ino)) is not None
    shutil.rmtree(cache)
    assert kernel() == 5


@pytest.mark.parametrize("behaviour", ["fail", "crash", "silent", "wrong_type"])
def test_c9_a_failed_compile_leaves_nothing_to_hit_and_fails_again(tmp_path, behaviour):
    count = tmp_path / "count"
    constants = toy.ToyConstants(behaviour=behaviour, count_file=str(count))
    for turn in (1, 2):
        service = _service(tmp_path / "cache")
        with pytest.raises(CompileError):
            service.get(constants)
        assert service.find(constants) == Miss(Reason.ABSENT)
        assert toy.compiles(count) == turn
    assert list(tmp_path.glob("cache/staging-v1/*")) == []
    assert list(tmp_path.glob("cache/entries-v1/*/*")) == []


def test_c9_a_failed_link_leaves_nothing_to_hit_and_a_good_linker_fills_the_same_key(tmp_path):
    broken = tmp_path / "broken-linker"
    broken.write_text("#!/bin/sh\nexit 1\n")
    broken.chmod(0o755)
    constants = toy.ToyConstants(value=9)
    with pytest.raises(CompileError, match="linking failed"):
        _service(tmp_path / "cache", cc=str(broken)).get(constants)
    assert _service(tmp_path / "cache").find(constants) == Miss(Reason.ABSENT)
    assert _service(tmp_path / "cache").get(constants)() == 9
