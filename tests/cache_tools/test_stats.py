"""stats: equal to `du`, families by number of entries, in one pass that keeps no entry."""

import json
import os
import pathlib
import subprocess

import pytest
from support import fixed
from support.fixed import KEYS

from muse_jit.store.layout import Layout


def _stats(layout, monkeypatch, capfd):
    code, out, err = fixed.tool(monkeypatch, capfd, "stats", "--json", "--cache-dir", layout.root)
    assert (code, err) == (0, "")
    return json.loads(out)


def _du(path):
    return int(subprocess.run(["du", "-s", "-B1", path], capture_output=True, text=True, check=True).stdout.split()[0])


def _litter(layout):
    """What else lies in a cache: set-aside folders, staging, locks, and things that are nobody's."""
    root = pathlib.Path(layout.root)
    for name in ("set-aside-v1/a-1/kernel.so", "set-aside-v1/b-2/compile.log", "staging-v1/x/kernel.so",
                 "locks-v1/ab/x.lock", "locks-v1/prune.lock", "notes.txt", "results/deep/er/table.csv",
                 "entries-v1/ab/stray.txt", "entries-v1/abc/file", "entries-v1/file"):  # fmt: skip
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_bytes(b"x" * 5000)
    inside = pathlib.Path(layout.entry(KEYS["plain"].digest)) / "sub" / "folder"
    inside.mkdir(parents=True)
    (inside / "file").write_bytes(b"x" * 9000)
    wrong_shard = root / "entries-v1" / "00" / ("f" * 64)
    wrong_shard.mkdir(parents=True)
    (wrong_shard / "kernel.so").write_bytes(b"x" * 5000)
    os.symlink("/etc", root / "link")


def test_the_total_is_that_of_du(tmp_path, monkeypatch, capfd):
    layout = fixed.fill(tmp_path / "cache")
    assert _stats(layout, monkeypatch, capfd)["total_disk"] == _du(layout.root)
    _litter(layout)
    stats = _stats(layout, monkeypatch, capfd)
    assert stats["total_disk"] == _du(layout.root)
    assert stats["set_aside"] == {"entries": 2, "disk": _du(layout.root + "/set-aside-v1")}
    assert stats["staging_disk"] == _du(layout.root + "/staging-v1")


def test_groups_add_up_and_agree_with_prune(tmp_path, monkeypatch, capfd):
    from muse_jit.store.prune import usages

    layout = fixed.fill(tmp_path / "cache")
    stats = _stats(layout, monkeypatch, capfd)
    for groups in ("kernels", "arches", "toolchains"):
        for field in ("entries", "disk", "used", "dead"):
            assert sum(g[field] for g in stats[groups]) == stats[field], (groups, field)
        assert sum(g["compile_s"] for g in stats[groups]) == pytest.approx(stats["compile_s"], abs=1e-3)
    assert stats["disk"] + stats["damaged"]["disk"] == sum(u.size for u in usages(layout))
    assert sum(stats["standings"].values()) == stats["entries"]


def test_e7_the_families_with_the_most_entries_come_first(tmp_path, monkeypatch, capfd):
    """A per-step value that became a constant fills a cache with one family: stats shows which, and how many."""
    layout = Layout(str(tmp_path / "cache"))
    for family, count in (("rare", 1), ("exploding", 7), ("usual", 3)):
        for value in range(count):
            fixed.put(layout, fixed.key(value, kernel=family))
    stats = _stats(layout, monkeypatch, capfd)
    assert [(k["kernel"], k["entries"]) for k in stats["kernels"]] == [("exploding", 7), ("usual", 3), ("rare", 1)]
    out = fixed.tool(monkeypatch, capfd, "stats", "--cache-dir", layout.root)[1].splitlines()
    table = out[out.index("") + 1 :]
    assert [line.split()[-1] for line in table[1:4]] == ["exploding", "usual", "rare"]
    assert table[1].split()[0] == "7"
    # and ls shows what the constant is
    out = fixed.tool(monkeypatch, capfd, "ls", "--tree", "--kernel", "exploding", "--cache-dir", layout.root)[1]
    assert sum("value=" in line for line in out.splitlines()) == 7


def test_an_empty_cache(tmp_path, monkeypatch, capfd):
    layout = Layout(str(tmp_path / "cache"))
    layout.create()
    stats = _stats(layout, monkeypatch, capfd)
    assert (stats["entries"], stats["total_disk"]) == (0, _du(layout.root))
    for verb in (["stats"], ["ls"], ["verify"], ["prune"], ["clear", "--yes"], ["ls", "--tree"]):
        code, out, err = fixed.tool(monkeypatch, capfd, *verb, "--cache-dir", layout.root)
        assert (code, err) == (0, "")
        assert out


@pytest.mark.parametrize("verb", [["ls"], ["stats"], ["verify"], ["prune"], ["clear", "--yes"], ["show", "ab"],
                                  ["explain", "ab"], ["report", "r.html"]])  # fmt: skip
def test_no_cache_is_one_line_that_says_what_to_do(tmp_path, monkeypatch, capfd, verb):
    code, out, err = fixed.tool(monkeypatch, capfd, *verb, "--cache-dir", tmp_path / "none")
    assert (code, out) == (3, "")
    assert err == f"muse-cache: there is no cache folder {tmp_path}/none; fill one with: muse-jit warmup\n"


def test_a_summary_keeps_no_entry(tmp_path):
    """Memory must not grow with the cache: nothing of an entry is alive after it was counted."""
    import gc

    from cache_tools.standing import Standings
    from cache_tools.summary import summarise
    from muse_jit.store.entry import Entry

    layout = Layout(str(tmp_path / "cache"))
    for value in range(30):
        fixed.put(layout, fixed.key(value))
    most = []

    def count(item):
        if item.digest[-1] in "0123":
            most.append(sum(isinstance(o, Entry) for o in gc.get_objects()))

    before = sum(isinstance(o, Entry) for o in gc.get_objects())
    summarise(layout, Standings(layout), also=count)
    assert most
    assert max(most) <= before + 3
