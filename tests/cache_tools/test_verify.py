"""verify: each kind of damage is found and named; --rebuild compiles again and compares."""

import dataclasses
import json
import os
import pathlib
import struct

import pytest
from support import elf, fixed, toy
from support.entries import entry

from cache_tools.library import BadLibrary, check_library, exported_symbols
from muse_jit.service import JitService
from muse_jit.store.layout import Layout
from muse_jit.store.publish import publish

KEY = fixed.key(1)


@pytest.fixture
def verify(monkeypatch, capfd):
    def verify(layout, *arguments):
        code, out, err = fixed.tool(monkeypatch, capfd, "verify", "--json", "--cache-dir", layout.root, *arguments)
        document = json.loads(out) if out else {"entries": []}
        return code, {e["digest"]: (e["status"], e["detail"], e["rebuilt"]) for e in document["entries"]}, err

    return verify


def _one(tmp_path, artifact=None, **changes):
    """A cache with a sound entry and the one to look at."""
    layout = Layout(str(tmp_path / "cache"))
    fixed.put(layout, fixed.key(2))
    artifact = elf.library(KEY.symbol) if artifact is None else artifact
    publish(layout, entry(KEY, artifact, **changes), artifact)
    return layout, pathlib.Path(layout.entry(KEY.digest))


def _edit(folder, **fields):
    document = json.loads((folder / "entry.json").read_text())
    (folder / "entry.json").write_text(json.dumps({**document, **fields}))


def test_sound_entries(tmp_path, verify):
    layout, _ = _one(tmp_path)
    code, found, _ = verify(layout)
    assert code == 0
    assert set(found.values()) == {("ok", "", None)}
    assert len(found) == 2


DAMAGE = {
    "bytes of the library": (lambda f: _flip(f / "kernel.so", 70), "bad_digest"),
    "library cut": (lambda f: os.truncate(f / "kernel.so", 100), "truncated"),
    "library gone": (lambda f: (f / "kernel.so").unlink(), "incomplete"),
    "library a folder": (lambda f: [(f / "kernel.so").unlink(), (f / "kernel.so").mkdir()], "untrusted"),
    "library a link": (lambda f: [(f / "kernel.so").rename(f / "x"), (f / "kernel.so").symlink_to("x")], "untrusted"),
    "library writable by all": (lambda f: os.chmod(f / "kernel.so", 0o666), "untrusted"),
    "manifest empty": (lambda f: (f / "entry.json").write_text(""), "bad_manifest"),
    "manifest gone": (lambda f: (f / "entry.json").unlink(), "incomplete"),
    "manifest of another schema": (lambda f: _edit(f, schema=99), "wrong_schema"),
    "key edited": (lambda f: _edit(f, key={**KEY.document, "source": "00"}), "bad_manifest"),
    "key and digest edited": (lambda f: _edit(f, key=fixed.key(9).document, digest=fixed.key(9).digest), "foreign_key"),
    "symbol edited": (lambda f: _edit(f, symbol="muse_jit_other"), "bad_manifest"),
}


def _flip(path, at):
    data = bytearray(path.read_bytes())
    data[at] ^= 1
    path.write_bytes(data)


@pytest.mark.parametrize("kind", DAMAGE)
def test_each_kind_of_damage_is_named_and_the_others_stay_sound(tmp_path, verify, kind):
    layout, folder = _one(tmp_path)
    DAMAGE[kind][0](folder)
    code, found, _ = verify(layout)
    assert code == 1
    assert found[KEY.digest][0] == "damaged"
    assert found[KEY.digest][1].startswith(DAMAGE[kind][1] + ": ")
    assert found[fixed.key(2).digest][0] == "ok"
    assert verify(layout, KEY.digest[:12])[0] == 1
    assert verify(layout, fixed.key(2).digest[:12])[0] == 0


LIBRARIES = {
    "no ELF": (b"#!/bin/sh\n" + bytes(200), "not a 64-bit ELF file"),
    "a relocatable object": (elf.cubin({}), "not a shared library"),
    "another machine": (elf.library(KEY.symbol, machine=183), "for machine 183, not for x86_64"),
    "another symbol": (elf.library("muse_jit_other"), f"does not export __tvm_ffi_{KEY.symbol}"),
    "tables outside": (elf.library(KEY.symbol)[:-300], "damaged tables"),
}


@pytest.mark.parametrize("kind", LIBRARIES)
def test_a_library_that_was_published_wrong_is_found_by_what_it_exports(tmp_path, verify, kind):
    """Digest and size fit: only the library itself can say it."""
    artifact, words = LIBRARIES[kind]
    layout, _ = _one(tmp_path, artifact)
    code, found, _ = verify(layout)
    assert code == 1
    assert found[KEY.digest][1].startswith("unloadable: ")
    assert words in found[KEY.digest][1]


def test_a_library_cut_anywhere_is_refused_never_an_error():
    whole = elf.library(KEY.symbol, elf.cubin({"k": (32, 0, 0, 16)}))
    check_library(whole, "x86_64", KEY.symbol)
    for length in range(0, len(whole), 7):
        with pytest.raises(BadLibrary):
            check_library(whole[:length], "x86_64", KEY.symbol)


def test_an_undefined_symbol_is_no_export():
    assert exported_symbols(elf.library("name")) == ["__tvm_ffi_name"]
    broken = bytearray(elf.library("name"))
    struct.pack_into("<Q", broken, 40, 1 << 60)
    with pytest.raises(BadLibrary):
        exported_symbols(bytes(broken))


def test_an_unknown_prefix_is_one_line(tmp_path, verify):
    code, _, err = verify(_one(tmp_path)[0], "zz")
    assert code == 2
    assert "no entry's digest begins with 'zz'" in err


def test_an_entry_pruned_while_it_is_checked_is_left_out(tmp_path, verify, monkeypatch):
    import shutil

    layout, folder = _one(tmp_path)
    from cache_tools.verbs import verify as module

    real = module.read_whole

    def somebody_prunes(layout, digest, *rest):
        if digest == KEY.digest:
            shutil.rmtree(folder, ignore_errors=True)
        return real(layout, digest, *rest)

    monkeypatch.setattr(module, "read_whole", somebody_prunes)
    code, found, _ = verify(layout)
    assert code == 0
    assert set(found) == {fixed.key(2).digest}


def test_an_entry_replaced_while_it_is_checked_is_read_again(tmp_path, verify, monkeypatch):
    import shutil

    from cache_tools import opening

    layout, folder = _one(tmp_path)
    real, replaced = opening.read_entry, []

    def somebody_replaces(layout, digest):
        found = real(layout, digest)
        if digest == KEY.digest and not replaced:
            replaced.append(1)
            (folder / "kernel.so").unlink()
            found = real(layout, digest)  # a pruner at work: the folder is still the old one, and half empty
            shutil.rmtree(folder)
            publish(layout, entry(KEY, elf.library(KEY.symbol)), elf.library(KEY.symbol))
        return found

    monkeypatch.setattr(opening, "read_entry", somebody_replaces)
    code, found, _ = verify(layout)
    assert (code, found[KEY.digest][0], replaced) == (0, "ok", [1])


@pytest.fixture
def built(settings):
    """A cache with one toy that was really compiled."""
    service = JitService("sm_90a", settings)
    return service.layout, service.obtain(toy.ToyConstants(value=5)).hit.entry


@pytest.mark.processes
def test_rebuilding_gives_the_same_bytes(built, verify):
    layout, made = built
    assert verify(layout, "--rebuild") == (0, {made.digest: ("ok", "", "same")}, "")


@pytest.mark.processes
def test_rebuilding_finds_other_bytes(built, verify):
    """A sound, well-signed entry of one key with the code of another: only compiling again can tell."""
    layout, made = built
    folder = pathlib.Path(layout.entry(made.digest))
    data = bytearray((folder / "kernel.so").read_bytes())
    at = data.index(b"GCC") if b"GCC" in data else len(data) - 1
    data[at] ^= 1
    changed = dataclasses.replace(made, artifact_digest=entry(KEY, bytes(data)).artifact_digest)
    (folder / "kernel.so").write_bytes(bytes(data))
    (folder / "entry.json").write_bytes(changed.to_json())
    assert verify(layout)[0] == 0
    code, found, _ = verify(layout, "--rebuild")
    status, detail, rebuilt = found[made.digest]
    assert (code, status, rebuilt) == (1, "differs", "differs")
    assert detail == f"compiling it again gave other bytes (1 bytes, the first at {at})"


def test_what_is_not_installed_any_more_is_not_compiled_and_not_damaged(tmp_path, verify):
    layout, _ = _one(tmp_path)
    code, found, _ = verify(layout, "--rebuild")
    assert code == 0
    assert found[KEY.digest][::2] == ("ok", "not compiled: another source and toolchain is installed now")


@pytest.mark.processes
def test_a_compile_that_fails_now_is_told(built, verify, monkeypatch):
    layout, made = built
    monkeypatch.setenv("CC", "/bin/false")
    code, found, _ = verify(layout, "--rebuild")
    assert code == 1
    assert found[made.digest][0] == "differs"
    assert "linking failed" in found[made.digest][1]
