"""Kinds I and M: identity, permissions, containers, and the security of a cache that holds code."""

import ast
import logging
import os
import pathlib
import stat

import pytest
from support import toy
from support.entries import ARTIFACT, entry, key
from support.mounts import remount, tmpfs
from support.process import ROOT, run, start

from muse_jit.service import JitService
from muse_jit.settings import Settings
from muse_jit.store.layout import Layout, default_root
from muse_jit.store.lookup import Hit, Miss, Reason, find
from muse_jit.store.publish import publish

pytestmark = pytest.mark.processes

needs_root = pytest.mark.skipif(os.geteuid() != 0, reason="needs root to become another user")


def _service(settings, **options):
    return JitService("sm_90a", settings.with_options(**options))


def _in_child_as_nobody(cache, code, **variables):
    """Run `code` under a user id without passwd entry and without HOME; everything is imported before."""
    return run(
        "import os, muse_jit, tvm_ffi, muse_jit.loader.kernel, muse_jit.store.publish, muse_jit.store.lock\n"
        "from support import toy\nfrom muse_jit.settings import Settings\n"
        "[os.environ.pop(n, None) for n in ('HOME', 'USER', 'LOGNAME', 'XDG_CACHE_HOME')]\n"
        "os.setgid(54321); os.setuid(54321)\n"
        f"settings = Settings().with_options(cache_dir={str(cache)!r})\n" + code,
        block=("cutlass", "torch"),
        **variables,
    ).strip()


@needs_root
def test_i1_i3_n4_a_hit_on_a_read_only_file_system_under_an_unknown_user(tmp_path):
    os.chmod(tmp_path, 0o755)
    for parent in tmp_path.parents:
        if parent.stat().st_mode & 0o005 != 0o005 and parent != pathlib.Path("/"):
            os.chmod(parent, 0o755)
    with tmpfs(tmp_path / "ro", "size=1m,mode=0755") as mount:
        cache = mount / "cache"
        _service(Settings().with_options(cache_dir=str(cache)), share="all").obtain(toy.ToyConstants(value=31))
        remount(mount, "ro")
        out = _in_child_as_nobody(
            cache,
            "service = muse_jit.JitService('sm_90a', settings)\n"
            "print(service.get(toy.ToyConstants(value=31))(), service.counters.disk_hits)",
            PATH="/nowhere",
        )
    assert out == "31 1"


def test_i1_i5_the_default_folder_names_the_user_id_and_no_user_name_is_looked_up(monkeypatch):
    import pwd

    def forbidden(*arguments):
        raise KeyError("uid not found")

    for name in ("HOME", "XDG_CACHE_HOME", "USER"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(pwd, "getpwuid", forbidden)
    monkeypatch.setattr(os, "getuid", lambda: 77777)
    assert default_root(None, None)[0] == "/var/tmp/muse_jit-77777"
    assert default_root("/given", None) == ("/given", "cache_dir")


def test_i2_f8_an_explicit_setting_always_wins(tmp_path):
    explicit = Settings.from_environ(
        {"MUSE_JIT_CACHE_DIR": str(tmp_path / "a"), "VLLM_CACHE_ROOT": str(tmp_path / "b")}
    )
    assert JitService("sm_90a", explicit).layout.root == str(tmp_path / "a")
    option = explicit.with_options(cache_dir=str(tmp_path / "c"))
    assert JitService("sm_90a", option).layout.root == str(tmp_path / "c")


def test_i4_a_miss_on_a_read_only_file_system_compiles_in_memory_with_one_warning(tmp_path, caplog):
    with tmpfs(tmp_path / "ro", "size=1m,mode=0700") as mount:
        Layout(str(mount / "cache")).create()
        remount(mount, "ro")
        service = _service(Settings().with_options(cache_dir=str(mount / "cache")))
        with caplog.at_level(logging.WARNING, "muse_jit"):
            assert service.get(toy.ToyConstants(value=4))() == 4
        assert service.counters.not_stored == 1
        warnings = {record.getMessage().split(" (")[0].split(":")[0] for record in caplog.records}
    assert warnings == {"no lock in the cache", "the cache cannot be written, kernels are used from memory"}


def test_i6_an_unwritable_shard_degrades_for_its_keys_only(settings):
    service = _service(settings)
    constants = [toy.ToyConstants(value=v) for v in range(6)]
    digests = [service.key_of(c)[1].digest for c in constants]
    blocked = pathlib.Path(service.layout.entries, digests[0][:2])
    blocked.parent.mkdir(parents=True)
    blocked.write_text("a file where a folder belongs")
    for constant in constants:
        assert service.get(constant)() == constant.value
    stored = [isinstance(service.find(c), Hit) for c in constants]
    assert stored == [not d.startswith(digests[0][:2]) for d in digests]


@pytest.mark.parametrize(
    ("share", "folder", "file"), [("owner", 0o700, 0o600), ("group", 0o750, 0o640), ("all", 0o755, 0o644)]
)
def test_i7_m4_one_mode_on_everything_locks_included(settings, share, folder, file):
    old = os.umask(0o027)
    try:
        service = _service(settings, share=share)
        service.get(toy.ToyConstants())
    finally:
        os.umask(old)
    root = pathlib.Path(settings.cache_dir)
    modes = {stat.S_IMODE(p.stat().st_mode) for p in [root, *root.rglob("*")] if p.is_dir()}
    assert modes == {folder}
    assert {stat.S_IMODE(p.stat().st_mode) for p in root.rglob("*") if p.is_file()} == {file}


def test_i8_trouble_is_a_warning_and_strict_makes_it_raise(settings, caplog):
    from muse_jit.errors import CacheUnusable

    pathlib.Path(settings.cache_dir).write_text("not a folder")
    with caplog.at_level(logging.WARNING, "muse_jit"):
        assert _service(settings).get(toy.ToyConstants())() == 7
    assert caplog.records
    with pytest.raises(CacheUnusable):
        _service(settings, strict=True).get(toy.ToyConstants())


def test_m1_the_current_folder_is_never_searched(tmp_path):
    for name in ("libcute_dsl_runtime.so", "kernel.so", "entry.json", "toolchain.json", "tvm_ffi.so"):
        (tmp_path / name).write_bytes(b"hostile")
    code = (
        f"import os; os.chdir({str(tmp_path)!r})\n"
        "sys.path[:] = [p for p in sys.path if p]\n"
        "import muse_jit\nfrom support import toy\nfrom muse_jit.settings import Settings\n"
        f"s = muse_jit.JitService('sm_90a', Settings().with_options(cache_dir={str(tmp_path / 'cache')!r}))\n"
        "print(s.get(toy.ToyConstants(value=8))())\n"
        "print([line for line in open('/proc/self/maps') if os.getcwd() + '/l' in line or os.getcwd() + '/k' in line])"
    )
    assert run(code, block=("cutlass", "torch")).split("\n")[:2] == ["8", "[]"]


def test_m2_nothing_that_executes_is_read_from_the_cache():
    """No unpickling, eval or marshal anywhere in the packages."""
    for package in ("muse_jit", "cache_tools"):
        for path in (ROOT / package).rglob("*.py"):
            tree = ast.parse(path.read_text())
            imports = {
                alias.name for node in ast.walk(tree) if isinstance(node, ast.Import) for alias in node.names
            } | {node.module for node in ast.walk(tree) if isinstance(node, ast.ImportFrom)}
            assert not imports & {"pickle", "marshal", "shelve", "dill", "cloudpickle"}, path
            calls = {n.func.id for n in ast.walk(tree) if isinstance(n, ast.Call) and isinstance(n.func, ast.Name)}
            assert not calls & {"eval", "exec", "compile"}, path


@pytest.mark.parametrize("level", ["entries-v1", "shard", "entry", "kernel.so", "entry.json"])
def test_m3_no_link_below_the_cache_folder_is_followed(tmp_path, level):
    layout = Layout(str(tmp_path / "cache"))
    publish(layout, entry(), ARTIFACT)
    folder = pathlib.Path(layout.entry(key().digest))
    path = {
        "entries-v1": folder.parent.parent,
        "shard": folder.parent,
        "entry": folder,
        "kernel.so": folder / "kernel.so",
        "entry.json": folder / "entry.json",
    }[level]
    assert isinstance(find(layout, key()), Hit)
    moved = tmp_path / "elsewhere"
    path.rename(moved)
    path.symlink_to(moved)
    miss = find(layout, key())
    assert isinstance(miss, Miss)
    assert miss.reason in (Reason.UNTRUSTED, Reason.ABSENT)


def test_m3_bytes_changed_after_the_check_are_not_what_is_loaded(settings):
    service = _service(settings)
    constants = toy.ToyConstants(value=12)
    hit = service.obtain(constants).hit
    again = service.find(constants)
    pathlib.Path(service.layout.entry(hit.entry.digest), "kernel.so").write_bytes(b"replaced")
    from muse_jit.key.toolchain import runtime_library
    from muse_jit.loader.kernel import load

    assert load(again.entry, again.artifact, runtime_library(service.target.cuda))() == 12


@needs_root
@pytest.mark.parametrize("fault", ["another owner", "others can write", "group can write"])
def test_m4_m5_a_folder_that_is_not_to_be_trusted_is_neither_read_nor_written(settings, fault, caplog):
    _service(settings).obtain(toy.ToyConstants(value=1))
    root = pathlib.Path(settings.cache_dir)
    if fault == "another owner":
        os.chown(root, 54321, 54321)
    else:
        root.chmod(0o777 if fault == "others can write" else 0o770)
    before = sorted(str(p) for p in root.rglob("*"))
    service = _service(settings)
    with caplog.at_level(logging.WARNING, "muse_jit"):
        assert service.get(toy.ToyConstants(value=1))() == 1
    assert (service.counters.disk_hits, service.counters.compiled) == (0, 1)
    assert sorted(str(p) for p in root.rglob("*")) == before
    assert "chmod go-w" in caplog.text or "belongs to user id 54321" in caplog.text


@needs_root
def test_m5_a_predictable_default_made_earlier_by_somebody_else_is_not_used(tmp_path):
    code = (
        "import os, muse_jit.store.layout as l\n"
        f"l.os.getuid = lambda: 4\n"
        f"real = l.default_root\n"
        f"root = {str(tmp_path / 'muse_jit-4')!r}\n"
        "os.mkdir(root); os.chown(root, 54321, 54321)\n"
        "from muse_jit.settings import Settings\nfrom support import toy\nimport muse_jit\n"
        "s = muse_jit.JitService('sm_90a', Settings().with_options(cache_dir=root))\n"
        "print(s.get(toy.ToyConstants(value=2))(), os.listdir(root))"
    )
    assert run(code, block=("cutlass", "torch")).strip() == "2 []"


def test_m2_tools_do_not_load_what_they_list(settings):
    """A library that would leave a trace when opened is listed and shown."""
    service = _service(settings)
    service.obtain(toy.ToyConstants())
    process = start(
        "import ctypes\n"
        "def refuse(*a, **k): raise SystemExit('opened a library')\n"
        "ctypes.CDLL = refuse\n"
        f"sys.argv[1:] = ['ls', '--cache-dir', {settings.cache_dir!r}]\n"
        "from cache_tools.cli import entry\nentry()"
    )
    out, err = process.communicate(timeout=60)
    assert process.returncode == 0, err
    assert "toy" in out
