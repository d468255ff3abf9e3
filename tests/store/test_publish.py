import errno
import os
import pathlib

import pytest
from support.entries import ARTIFACT, entry, key

from muse_jit.key.toolchain import Toolchain
from muse_jit.store import layout as layout_module
from muse_jit.store.layout import Layout
from muse_jit.store.lookup import Hit, Miss, Reason, find
from muse_jit.store.publish import keep_log, publish, record_toolchain, recorded_toolchains, set_aside


@pytest.fixture
def layout(tmp_path):
    return Layout(str(tmp_path / "cache"))


def _files(layout):
    return sorted(str(p.relative_to(layout.root)) for p in pathlib.Path(layout.root).rglob("*") if p.is_file())


def test_an_entry_is_two_files_and_staging_is_left_empty(layout):
    assert publish(layout, entry(), ARTIFACT) == entry()
    digest = key().digest
    assert _files(layout) == [
        "CACHEDIR.TAG",
        "README",
        f"entries-v1/{digest[:2]}/{digest}/entry.json",
        f"entries-v1/{digest[:2]}/{digest}/kernel.so",
    ]
    assert os.listdir(os.path.join(layout.root, "staging-v1")) == []


def test_the_loser_of_a_race_keeps_the_winner(layout):
    publish(layout, entry(created=1.0), ARTIFACT)
    assert publish(layout, entry(created=2.0), ARTIFACT).created == 1.0


def test_a_damaged_entry_in_the_way_is_set_aside(layout):
    publish(layout, entry(), ARTIFACT)
    path = pathlib.Path(layout.entry(key().digest), "kernel.so")
    path.write_bytes(b"damaged")
    assert publish(layout, entry(created=2.0), ARTIFACT).created == 2.0
    assert isinstance(find(layout, key()), Hit)
    aside = list(pathlib.Path(layout.root, "set-aside-v1").iterdir())
    assert [(p / "kernel.so").read_bytes() for p in aside] == [b"damaged"]


def test_only_the_folder_that_was_found_damaged_is_set_aside(layout):
    publish(layout, entry(), ARTIFACT)
    inode = os.stat(layout.entry(key().digest)).st_ino
    assert set_aside(layout, key().digest, Miss(Reason.BAD_DIGEST, "", inode + 1)) is None
    assert isinstance(find(layout, key()), Hit)
    assert set_aside(layout, key().digest, Miss(Reason.BAD_DIGEST, "", inode)) is not None
    assert find(layout, key()) == Miss(Reason.ABSENT)
    assert set_aside(layout, key().digest, Miss(Reason.BAD_DIGEST, "", inode)) is None


@pytest.mark.parametrize("call", ["write", "fsync", "rename", "mkdir", "open"])
@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EDQUOT, errno.EIO])
def test_no_trouble_of_the_disk_leaves_half_an_entry(layout, monkeypatch, call, code):
    layout.create()
    before = _files(layout)

    def failing(*arguments, **named):
        raise OSError(code, os.strerror(code))

    monkeypatch.setattr(layout_module.os, call, failing)
    with pytest.raises(OSError, match=os.strerror(code)):
        publish(layout, entry(), ARTIFACT)
    monkeypatch.undo()
    assert _files(layout) == before
    assert find(layout, key()) == Miss(Reason.ABSENT)
    publish(layout, entry(), ARTIFACT)
    assert isinstance(find(layout, key()), Hit)


@pytest.mark.parametrize("number", [1, 2, 3])
def test_a_close_that_fails_is_a_write_that_failed(layout, monkeypatch, number):
    """As network file systems report a full disk: of kernel.so, of entry.json, of the staging folder."""
    layout.create()
    layout.make_parents(layout.entry(key().digest))
    before = _files(layout)
    real, count = os.close, 0

    def failing(descriptor):
        nonlocal count
        real(descriptor)
        count += 1
        if count == number:
            raise OSError(errno.EDQUOT, os.strerror(errno.EDQUOT))

    monkeypatch.setattr(layout_module.os, "close", failing)
    with pytest.raises(OSError, match=os.strerror(errno.EDQUOT)):
        publish(layout, entry(), ARTIFACT)
    monkeypatch.undo()
    assert count >= number
    assert _files(layout) == before
    assert find(layout, key()) == Miss(Reason.ABSENT)
    publish(layout, entry(), ARTIFACT)
    assert isinstance(find(layout, key()), Hit)


def test_short_writes_are_continued(layout, monkeypatch):
    real = os.write
    monkeypatch.setattr(layout_module.os, "write", lambda fd, data: real(fd, bytes(data)[:100]))
    publish(layout, entry(), ARTIFACT)
    assert find(layout, key()).artifact == ARTIFACT


def test_the_cache_may_be_deleted_at_any_time(layout):
    import shutil

    publish(layout, entry(), ARTIFACT)
    shutil.rmtree(layout.root)
    publish(layout, entry(), ARTIFACT)
    assert isinstance(find(layout, key()), Hit)


def test_toolchains_are_recorded_once_each(layout):
    layout.create()
    first = Toolchain(13, "x86_64", {"a": 1}, "installed")
    for toolchain, when in ((first, 1.0), (first, 2.0), (Toolchain(12, "x86_64", {"a": 2}, "installed"), 3.0)):
        record_toolchain(layout, toolchain, when)
    records = recorded_toolchains(layout)
    assert [(r["cuda"], r["recorded"], r["parts"]) for r in records] == [(13, 1.0, {"a": 1}), (12, 3.0, {"a": 2})]


@pytest.mark.parametrize("text", ["", "null", "{}", '{"toolchains": 3}', '{"toolchains": [{"digest": 1}, null]}', "["])
def test_toolchain_records_that_cannot_be_understood_are_none(layout, text):
    layout.create()
    pathlib.Path(layout.toolchains).write_text(text)
    assert recorded_toolchains(layout) == []


def test_a_log_is_kept_beside_what_was_set_aside(layout):
    path = keep_log(layout, key().digest, "what the compiler said\n")
    assert pathlib.Path(path).read_text() == "what the compiler said\n"
    assert f"set-aside-v1/{key().digest}-" in path
