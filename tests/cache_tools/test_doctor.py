"""doctor: what each check finds, made to happen, and that its remedy is named."""

import ctypes
import fcntl
import json
import os
import pathlib

import pytest
from support import fixed
from support.mounts import tmpfs

from cache_tools import health, health_machine
from cache_tools.health import folder_checks
from muse_jit.errors import ToolchainError
from muse_jit.key.toolchain import Toolchain
from muse_jit.settings import Settings
from muse_jit.store.layout import Layout

SETTINGS = Settings()


@pytest.fixture
def cache(tmp_path):
    return fixed.fill(tmp_path / "cache")


def _checks(layout, settings=SETTINGS):
    found = {c.name: c for c in folder_checks(layout, "option", settings)}
    assert all(c.remedy for c in found.values() if c.status == "fail")
    return found


def _snapshot(root):
    return sorted(str(p.relative_to(root)) for p in pathlib.Path(root).rglob("*"))


def test_a_sound_folder_and_nothing_is_left_behind(cache):
    before = _snapshot(cache.root)
    found = _checks(cache)
    assert list(found) == [
        "folder", "owner", "mode", "links", "file system", "lock", "rename", "space", "inodes", "exec",
    ]  # fmt: skip
    assert {c.status for n, c in found.items() if n not in ("space", "inodes", "file system")} == {"ok"}
    assert _snapshot(cache.root) == before


def test_a_folder_that_is_not_there_yet_is_not_made(tmp_path):
    layout = Layout(str(tmp_path / "a" / "b"))
    found = _checks(layout)
    assert found["folder"].status == "warn"
    assert "muse-jit warmup" in found["folder"].remedy
    assert os.listdir(tmp_path) == []


def test_a_file_in_its_place(tmp_path):
    (tmp_path / "file").write_text("")
    assert _checks(Layout(str(tmp_path / "file")))["folder"].status == "fail"


def test_owner(cache, monkeypatch):
    monkeypatch.setattr(os, "geteuid", lambda: 4242)
    if os.getuid() == 0:  # the folder is root's: used by everybody, added to by root only
        assert _checks(cache)["owner"].message.startswith("root: ")
        os.chown(cache.root, 4243, -1)
    found = _checks(cache)["owner"]
    assert found.status == "fail"
    assert "MUSE_JIT_CACHE_DIR" in found.remedy


def test_mode(cache):
    os.chmod(cache.root, 0o770)
    found = _checks(cache)
    assert (found["mode"].status, found["mode"].remedy) == ("fail", f"chmod go-w {cache.root}")
    assert "lock" not in found  # nothing is tried in a folder that is not to be trusted
    os.chmod(cache.root, 0o700)
    shared = _checks(Layout(cache.root, "group"))["mode"]
    assert (shared.status, shared.remedy) == ("warn", f"chmod 750 {cache.root}")


def test_a_link_below_the_folder(cache, tmp_path):
    os.rename(cache.entries, tmp_path / "elsewhere")
    os.symlink(tmp_path / "elsewhere", cache.entries)
    found = _checks(cache)["links"]
    assert found.status == "fail"
    assert "entries-v1" in found.message


@pytest.mark.parametrize(
    ("kind", "status"),
    [
        ("ext4", "ok"),
        ("nfs4", "warn"),
        ("fuse.sshfs", "warn"),
        ("lustre", "warn"),
        ("tmpfs", "warn"),
        ("overlay", "ok"),
    ],
)
def test_file_system(cache, monkeypatch, kind, status):
    monkeypatch.setattr(health, "_mount_of", lambda path: (kind, "rw"))
    found = _checks(cache)["file system"]
    assert found.status == status
    assert bool(found.remedy) == (status == "warn")


def test_the_mount_of_a_path_is_found(tmp_path):
    with tmpfs(tmp_path / "with space", "size=1m"):
        assert health._mount_of(str(tmp_path / "with space"))[0] == "tmpfs"
    assert health._mount_of("/proc")[0] == "proc"


def test_a_lock_that_lets_two_in_and_one_that_is_not_there(cache, monkeypatch):
    monkeypatch.setattr(fcntl, "flock", lambda descriptor, how: None)
    assert _checks(cache)["lock"].status == "fail"

    def no_locks(descriptor, how):
        raise OSError(37, "No locks available")

    monkeypatch.setattr(fcntl, "flock", no_locks)
    assert _checks(cache)["lock"].status == "warn"


def test_a_rename_that_replaces_and_one_that_fails(cache, monkeypatch):
    real = os.rename

    def replaces(source, target):
        import shutil

        shutil.rmtree(target, ignore_errors=True)
        real(source, target)

    monkeypatch.setattr(os, "rename", replaces)
    assert _checks(cache)["rename"].status == "fail"

    def refuses(source, target):
        raise OSError(18, "Invalid cross-device link")

    monkeypatch.setattr(os, "rename", refuses)
    assert "Invalid cross-device link" in _checks(cache)["rename"].message


def test_a_read_only_file_system(tmp_path):
    from support.mounts import remount

    with tmpfs(tmp_path / "m", "size=4m,mode=0700"):
        layout = fixed.fill(tmp_path / "m")
        remount(tmp_path / "m", "ro")
        found = _checks(layout)
        assert found["writing"].status == "warn"
        assert "MUSE_JIT_MODE=readonly" in found["writing"].remedy
        assert _checks(layout, Settings(mode="readonly"))["writing"].status == "ok"


def test_little_space_and_few_inodes(tmp_path):
    with tmpfs(tmp_path / "m", "size=64m,nr_inodes=400,mode=0700"):
        layout = Layout(str(tmp_path / "m"))
        found = _checks(layout)
        assert (found["space"].status, found["inodes"].status) == ("warn", "warn")
        assert "prune" in found["space"].remedy
        pathlib.Path(layout.root, "full").write_bytes(bytes(60 << 20))
        for n in range(330):
            pathlib.Path(layout.root, str(n)).touch()
        found = _checks(layout)
        assert (found["space"].status, found["inodes"].status) == ("fail", "fail")


def test_memory_that_may_not_be_executed(cache, monkeypatch):
    def forbidden(*_):
        raise PermissionError(1, "Operation not permitted")

    monkeypatch.setattr(health.mmap, "mmap", forbidden)
    found = _checks(cache)["exec"]
    assert found.status == "fail"
    assert "memfd_noexec" in found.remedy


def test_a_cache_that_is_switched_off(cache):
    assert any(c.status == "warn" and "off" in c.message for c in folder_checks(cache, "", Settings(mode="off")))


def _machine(cache, settings=SETTINGS):
    found = {c.name: c for c in health_machine.machine_checks(cache, settings)}
    assert all(c.remedy for c in found.values() if c.status == "fail")
    return found


def test_a_sound_machine(cache):
    found = _machine(cache)
    assert list(found) == ["linker", "toolchain", "runtime", "driver"]
    assert {c.status for n, c in found.items() if n != "driver"} == {"ok"}
    assert "the installed bytes are the recorded ones" in found["toolchain"].message


def test_linker(cache, monkeypatch):
    assert _machine(cache, Settings(cc="/bin/false"))["linker"].status == "fail"
    monkeypatch.setenv("PATH", "/nowhere")
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    found = _machine(cache)["linker"]
    assert found.status == "warn"
    assert "install gcc" in found.remedy


def test_toolchain_that_was_changed_recorded_only_or_missing(cache, monkeypatch):
    changed = Toolchain(13, "x86_64", fixed.PARTS, "installed", ("libs-base: a.py",))
    monkeypatch.setattr(health_machine, "identify", lambda *_, **__: changed)
    found = _machine(cache)["toolchain"]
    assert (found.status, "libs-base: a.py" in found.message) == ("fail", True)
    monkeypatch.setattr(
        health_machine, "identify", lambda *_, **__: Toolchain(13, "x86_64", fixed.PARTS, "toolchain.json")
    )
    assert _machine(cache)["toolchain"].status == "warn"

    def missing(*_, **__):
        raise ToolchainError("nothing is installed; install nvidia-cutlass-dsl")

    monkeypatch.setattr(health_machine, "identify", missing)
    found = _machine(cache)
    assert (found["toolchain"].status, found["toolchain"].remedy) == ("fail", "install nvidia-cutlass-dsl")
    assert "runtime" not in found


def test_runtime_library(cache):
    found = _machine(cache, Settings(runtime_lib="/nowhere/lib.so"))["runtime"]
    assert found.status == "fail"
    assert "/nowhere/lib.so" in found.message


class _Driver:
    def __init__(self, version, code=0):
        self.version, self.code = version, code

    def cuDriverGetVersion(self, pointer):
        pointer._obj.value = self.version
        return self.code


@pytest.mark.parametrize(
    ("driver", "status", "words"),
    [
        (_Driver(13020), "ok", "supports CUDA 13.2"),
        (_Driver(12080), "fail", "it supports CUDA 12.8, kernels are made for CUDA 13"),
        (_Driver(0, 3), "warn", "error 3"),
    ],
)
def test_driver(monkeypatch, driver, status, words):
    monkeypatch.setattr(ctypes, "CDLL", lambda name: driver)
    found = health_machine._driver(Toolchain(13, "x86_64", {}, "installed"))
    assert found.status == status
    assert words in found.message
    assert bool(found.remedy) == (status != "ok")


def test_no_driver_is_fine(monkeypatch):
    def absent(name):
        raise OSError("no such library")

    monkeypatch.setattr(ctypes, "CDLL", absent)
    assert health_machine._driver(None).status == "ok"


def test_exit_code_and_json(cache, monkeypatch, capfd):
    monkeypatch.setenv("CC", "/bin/false")
    code, out, err = fixed.tool(monkeypatch, capfd, "doctor", "--json", "--cache-dir", cache.root)
    assert (code, err) == (1, "")
    document = json.loads(out)
    assert document["failed"] == 1
    assert [c["name"] for c in document["checks"] if c["status"] == "fail"] == ["linker"]
