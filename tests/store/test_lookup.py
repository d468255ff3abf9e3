import os
import pathlib

import pytest
from support.entries import ARTIFACT, entry, key

from muse_jit.store.layout import Layout
from muse_jit.store.lookup import Hit, Miss, Reason, find, read_entry, read_manifest
from muse_jit.store.publish import publish


@pytest.fixture
def layout(tmp_path):
    return Layout(str(tmp_path / "cache"))


@pytest.fixture
def folder(layout):
    """The folder of one published entry."""
    publish(layout, entry(), ARTIFACT)
    return pathlib.Path(layout.entry(key().digest))


def test_a_hit_hands_over_the_verified_bytes(layout, folder):
    hit = find(layout, key())
    assert isinstance(hit, Hit)
    assert (hit.artifact, hit.entry) == (ARTIFACT, entry())
    assert hit.inode == folder.stat().st_ino


def test_an_empty_or_missing_cache_is_a_miss(layout):
    assert find(layout, key()) == Miss(Reason.ABSENT)


def test_a_hit_writes_nothing_and_takes_no_lock(layout, folder, monkeypatch):
    before = sorted((str(p), p.stat().st_mtime_ns) for p in pathlib.Path(layout.root).rglob("*"))
    real = os.open

    def reading_only(path, flags, *rest, **named):
        assert not flags & (os.O_WRONLY | os.O_RDWR | os.O_CREAT), path
        return real(path, flags, *rest, **named)

    monkeypatch.setattr(os, "open", reading_only)
    assert isinstance(find(layout, key()), Hit)
    monkeypatch.undo()
    assert sorted((str(p), p.stat().st_mtime_ns) for p in pathlib.Path(layout.root).rglob("*")) == before


def _flip(path):
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)


def _replace_with_link(path):
    moved = path.with_name("elsewhere")
    path.rename(moved)
    path.symlink_to(moved)


DAMAGE = {
    "artifact missing": (lambda f: (f / "kernel.so").unlink(), Reason.INCOMPLETE),
    "manifest missing": (lambda f: (f / "entry.json").unlink(), Reason.INCOMPLETE),
    "artifact empty": (lambda f: (f / "kernel.so").write_bytes(b""), Reason.TRUNCATED),
    "artifact cut": (lambda f: (f / "kernel.so").write_bytes(ARTIFACT[:-1]), Reason.TRUNCATED),
    "artifact grown": (lambda f: (f / "kernel.so").write_bytes(ARTIFACT + b"x"), Reason.TRUNCATED),
    "one bit of the artifact": (lambda f: _flip(f / "kernel.so"), Reason.BAD_DIGEST),
    "manifest empty": (lambda f: (f / "entry.json").write_bytes(b""), Reason.BAD_MANIFEST),
    "manifest garbage": (lambda f: (f / "entry.json").write_bytes(os.urandom(300)), Reason.BAD_MANIFEST),
    "manifest of another key": (lambda f: (f / "entry.json").write_bytes(entry(key(2)).to_json()), Reason.FOREIGN_KEY),
    "manifest of another schema": (
        lambda f: (f / "entry.json").write_bytes(entry(schema=9).to_json()),
        Reason.WRONG_SCHEMA,
    ),
    "artifact is a link": (lambda f: _replace_with_link(f / "kernel.so"), Reason.UNTRUSTED),
    "manifest is a link": (lambda f: _replace_with_link(f / "entry.json"), Reason.UNTRUSTED),
    "artifact others can write": (lambda f: (f / "kernel.so").chmod(0o666), Reason.UNTRUSTED),
    "artifact is a folder": (lambda f: ((f / "kernel.so").unlink(), (f / "kernel.so").mkdir()), Reason.UNTRUSTED),
    "artifact is a pipe": (lambda f: ((f / "kernel.so").unlink(), os.mkfifo(f / "kernel.so")), Reason.UNTRUSTED),
}


@pytest.mark.parametrize("name", DAMAGE)
def test_damage_is_a_miss_with_its_reason(layout, folder, name):
    damage, reason = DAMAGE[name]
    damage(folder)
    miss = find(layout, key())
    assert isinstance(miss, Miss)
    assert miss.reason == reason, miss.detail
    assert miss.detail
    assert miss.inode == folder.stat().st_ino


def test_the_entry_folder_as_a_link_is_not_followed(layout, folder):
    moved = folder.with_name("elsewhere")
    folder.rename(moved)
    folder.symlink_to(moved)
    miss = find(layout, key())
    assert miss.reason in (Reason.UNTRUSTED, Reason.ABSENT)


def test_the_whole_stored_key_is_compared(layout, folder, monkeypatch):
    other = key(2)
    monkeypatch.setattr(type(other), "digest", key().digest)
    miss = find(layout, other)
    assert miss.reason == Reason.FOREIGN_KEY
    assert "constants.value: 1 -> 2" in miss.detail


def test_a_root_others_can_write_to_is_untrusted(layout, folder):
    os.chmod(layout.root, 0o777)
    miss = find(layout, key())
    assert miss.reason == Reason.UNTRUSTED
    assert "0777" in miss.detail


@pytest.mark.skipif(os.geteuid() != 0, reason="needs root to give files away")
def test_an_entry_of_another_user_is_untrusted(layout, folder):
    os.chown(folder / "kernel.so", 54321, 54321)
    assert find(layout, key()).reason == Reason.UNTRUSTED


def test_manifest_alone(layout, folder):
    assert read_manifest(layout, key().digest) == entry()
    (folder / "kernel.so").unlink()
    assert read_manifest(layout, key().digest) == entry()
    assert read_entry(layout, key().digest).reason == Reason.INCOMPLETE
