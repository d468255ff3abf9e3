import os
import pathlib

from support.entries import ARTIFACT, entry, key

from muse_jit.store.layout import Layout
from muse_jit.store.listing import digests, listed
from muse_jit.store.lookup import Miss, Reason
from muse_jit.store.publish import publish


def _fill(tmp_path, count=5):
    layout = Layout(str(tmp_path / "cache"))
    for value in range(count):
        publish(layout, entry(key(value)), ARTIFACT)
    return layout


def test_all_entries_by_digest_with_their_sizes(tmp_path):
    layout = _fill(tmp_path)
    items = list(listed(layout))
    assert [i.digest for i in items] == sorted(key(v).digest for v in range(5))
    assert all(i.size == len(ARTIFACT) + len(i.entry.to_json()) for i in items)


def test_prefixes(tmp_path):
    layout = _fill(tmp_path)
    for value in range(5):
        digest = key(value).digest
        for length in (1, 2, 5, 64):
            assert digest in list(digests(layout, digest[:length]))
    assert list(digests(layout, "zz")) == []


def test_damaged_entries_are_listed_and_foreign_files_are_not(tmp_path):
    layout = _fill(tmp_path, 2)
    (pathlib.Path(layout.entry(key(0).digest)) / "entry.json").write_text("{")
    entries = pathlib.Path(layout.entries)
    (entries / "somebody.txt").write_text("x")
    (entries / "ab").mkdir(exist_ok=True)
    (entries / "ab" / "not-a-digest").mkdir()
    os.symlink("/", entries / "ac")
    items = {i.digest: i.entry for i in listed(layout)}
    assert set(items) == {key(0).digest, key(1).digest}
    assert isinstance(items[key(0).digest], Miss)
    assert items[key(0).digest].reason == Reason.BAD_MANIFEST


def test_no_cache_has_no_entries(tmp_path):
    assert list(listed(Layout(str(tmp_path / "absent")))) == []
