import os
import pathlib
import time

import pytest
from support.entries import ARTIFACT, entry, key

from muse_jit.store.layout import Layout
from muse_jit.store.listing import digests
from muse_jit.store.lock import try_lock
from muse_jit.store.prune import prune, sweep, touch, usages
from muse_jit.store.publish import publish

NOW = 2_000_000_000.0
DAY = 86400.0


@pytest.fixture
def layout(tmp_path):
    """Five entries, last used 0, 10, 20, 30 and 40 days before NOW."""
    layout = Layout(str(tmp_path / "cache"))
    for value in range(5):
        publish(layout, entry(key(value)), ARTIFACT)
        _stamp(layout, value, NOW - 10 * DAY * value)
    return layout


def _stamp(layout, value, when):
    os.utime(os.path.join(layout.entry(key(value).digest), "entry.json"), (when, when))


def _left(layout):
    known = {key(value).digest: value for value in range(5)}
    return sorted(known[d] for d in digests(layout))


def _du(layout):
    return sum(p.lstat().st_blocks * 512 for p in pathlib.Path(layout.entries).rglob("*") if len(p.name) > 2)


def test_sizes_are_those_of_du(layout):
    assert sum(u.size for u in usages(layout)) == _du(layout) > 5 * len(ARTIFACT)


def test_by_age(layout):
    report = prune(layout, older_than=25 * DAY, now=NOW)
    assert _left(layout) == [0, 1, 2]
    assert (len(report.removed), report.kept_entries, report.kept_bytes) == (2, 3, _du(layout))


def test_by_size_the_least_recently_used_go_first_and_no_more_than_needed(layout):
    size = usages(layout)[0].size
    report = prune(layout, max_bytes=3 * size + size // 2, now=NOW)
    assert _left(layout) == [0, 1, 2]
    assert report.kept_bytes == 3 * size
    assert prune(layout, max_bytes=3 * size, now=NOW).removed == []


def test_a_dry_run_removes_nothing_and_says_the_same(layout):
    would = prune(layout, older_than=25 * DAY, now=NOW, dry_run=True)
    assert _left(layout) == [0, 1, 2, 3, 4]
    assert would == prune(layout, older_than=25 * DAY, now=NOW)


def test_only_what_may_be_removed(layout):
    prune(layout, older_than=5 * DAY, now=NOW, only=lambda u: u.digest == key(3).digest)
    assert _left(layout) == [0, 1, 2, 4]


@pytest.mark.parametrize("stamp", [0.0, NOW + 365 * DAY])
def test_stamps_from_1970_and_from_next_year_are_old(layout, stamp):
    _stamp(layout, 0, stamp)
    prune(layout, older_than=300 * DAY, now=NOW)
    assert _left(layout) == [1, 2, 3, 4]


def test_one_pruner_at_a_time(layout):
    with try_lock(layout, os.path.join(layout.locks, "prune.lock"), "test") as taken:
        assert taken
        assert prune(layout, max_bytes=0, now=NOW).busy
    assert _left(layout) == [0, 1, 2, 3, 4]


def test_an_entry_that_vanishes_meanwhile_counts_as_freed(layout, monkeypatch):
    from muse_jit.store import prune as module

    size = usages(layout)[0].size
    real = module._remove

    def somebody_was_first(layout, path):
        real(layout, path)
        real(layout, path)

    monkeypatch.setattr(module, "_remove", somebody_was_first)
    assert len(prune(layout, max_bytes=2 * size, now=NOW).removed) == 3
    assert _left(layout) == [0, 1]


def test_foreign_files_stay(layout):
    strays = [pathlib.Path(layout.root, "notes.txt"), pathlib.Path(layout.entries, "ab.txt")]
    for stray in strays:
        stray.write_text("mine")
    prune(layout, max_bytes=0, now=NOW)
    assert _left(layout) == []
    assert [s.read_text() for s in strays] == ["mine", "mine"]


def test_old_litter_goes_and_live_staging_stays(layout):
    folders = {}
    for kind, name, age in (
        ("staging-v1", "live", 60.0),
        ("staging-v1", "dead", 2 * 3600.0),
        ("set-aside-v1", "new", DAY),
        ("set-aside-v1", "old", 8 * DAY),
    ):
        folder = pathlib.Path(layout.root, kind, name)
        folder.mkdir(parents=True)
        (folder / "file").write_text("x")
        os.utime(folder, (NOW - age, NOW - age))
        folders[name] = folder
    assert sweep(layout, NOW, dry_run=True) == 2
    assert sweep(layout, NOW) == 2
    assert [name for name, folder in folders.items() if folder.exists()] == ["live", "new"]


def test_last_use_is_written_at_most_once_a_day_and_failure_is_silent(layout, monkeypatch):
    path = os.path.join(layout.entry(key(1).digest), "entry.json")
    before = os.stat(path).st_mtime
    touch(layout, key(1).digest, before, before + 3600)
    assert os.stat(path).st_mtime == before
    touch(layout, key(1).digest, before, before + 2 * DAY)
    assert os.stat(path).st_mtime == before + 2 * DAY

    def refused(*arguments, **named):
        raise PermissionError

    monkeypatch.setattr(os, "utime", refused)
    touch(layout, key(1).digest, before, time.time())
