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


def test_what_it_takes_on_disk_and_when_it_was_used(tmp_path):
    layout = _fill(tmp_path, 1)
    folder = pathlib.Path(layout.entry(key(0).digest))
    os.utime(folder / "entry.json", (5000.0, 5000.0))
    (item,) = listed(layout)
    assert item.last_used == 5000.0
    assert item.disk == sum(p.lstat().st_blocks * 512 for p in (folder, *folder.iterdir()))


def test_a_library_that_is_missing_or_cut_is_seen_without_reading_it(tmp_path):
    layout = _fill(tmp_path, 2)
    os.unlink(os.path.join(layout.entry(key(0).digest), "kernel.so"))
    os.truncate(os.path.join(layout.entry(key(1).digest), "kernel.so"), 5)
    found = {i.digest: i.entry.reason for i in listed(layout)}
    assert found == {key(0).digest: Reason.INCOMPLETE, key(1).digest: Reason.TRUNCATED}


def test_an_entry_that_is_replaced_or_pruned_while_it_is_listed_is_not_damaged(tmp_path, monkeypatch):
    import shutil

    from muse_jit.store import listing

    layout = _fill(tmp_path, 2)
    real, done = listing.manifest_in, set()

    def somebody(folder, digest):
        if digest not in done:
            done.add(digest)
            shutil.rmtree(layout.entry(digest))
            if digest == key(0).digest:
                publish(layout, entry(key(0)), ARTIFACT)
        return real(folder, digest)

    monkeypatch.setattr(listing, "manifest_in", somebody)
    assert [(i.digest, isinstance(i.entry, Miss)) for i in listed(layout)] == [(key(0).digest, False)]
