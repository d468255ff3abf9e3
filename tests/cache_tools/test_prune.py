"""prune and clear through the command: what goes, what stays, and whose it is not."""

import json
import os
import pathlib

import pytest
from support import fixed
from support.fixed import KEYS

from muse_jit.store.layout import Layout
from muse_jit.store.listing import digests
from muse_jit.store.lock import try_lock

NAMES = {key.digest: name for name, key in KEYS.items()}


@pytest.fixture
def cache(tmp_path, monkeypatch):
    fixed.stand_still(monkeypatch)
    return fixed.fill(tmp_path / "cache")


def _left(layout):
    return {NAMES[d] for d in digests(layout)}


@pytest.mark.parametrize(
    ("options", "gone"),
    [
        (["--older-than", "30d"], {"old_toolchain"}),
        (["--toolchain", "stale"], {"old_toolchain"}),
        (["--arch", "sm_103a"], {"other_arch"}),
        (["--kernel", "gemm\x1b[31m"], {"other_kernel"}),
        (["--damaged"], {"bad_digest", "bad_manifest", "incomplete"}),
        (["--older-than", "10d", "--arch", "sm_90a"], {"old_toolchain", "old_source"}),
        (["--older-than", "10d", "--toolchain", "current"], {"old_source"}),
        (["--max-size", "1G"], set()),
        (["--max-size", "0"], set(KEYS)),
        (["--max-size", "0", "--arch", "sm_103a"], {"other_arch"}),
        ([], set()),
    ],
)
def test_what_goes_and_what_a_dry_run_says(cache, monkeypatch, capfd, options, gone):
    before = _left(cache)
    arguments = ["prune", *options, "--json", "--cache-dir", cache.root]
    code, would, _ = fixed.tool(monkeypatch, capfd, *arguments, "--dry-run")
    assert (code, _left(cache)) == (0, before)
    code, did, _ = fixed.tool(monkeypatch, capfd, *arguments)
    assert code == 0
    assert _left(cache) == before - gone
    would, did = json.loads(would), json.loads(did)
    assert (would.pop("dry_run"), did.pop("dry_run")) == (True, False)
    assert would == did
    assert {NAMES[e["digest"]] for e in did["removed"]} == gone
    assert did["kept_entries"] == len(before - gone)


def test_without_options_the_settings_bound_holds(cache, monkeypatch, capfd):
    monkeypatch.setenv("MUSE_JIT_MAX_BYTES", "30K")
    code, _, _ = fixed.tool(monkeypatch, capfd, "prune", "--cache-dir", cache.root)
    assert code == 0
    assert len(_left(cache)) == 2


def test_another_pruner_at_work(cache, monkeypatch, capfd):
    with try_lock(cache, os.path.join(cache.locks, "prune.lock"), "test") as taken:
        assert taken
        code, out, _ = fixed.tool(monkeypatch, capfd, "prune", "--max-size", "0", "--cache-dir", cache.root)
        assert code == 1
        assert out == "another process is pruning this cache right now; nothing was done\n"
        assert fixed.tool(monkeypatch, capfd, "clear", "--yes", "--cache-dir", cache.root)[0] == 1
    assert _left(cache) == set(KEYS)


@pytest.mark.parametrize("verb", [["prune", "--max-size", "0"], ["clear", "--yes"]])
def test_a_folder_that_others_can_write_is_refused(cache, monkeypatch, capfd, verb):
    os.chmod(cache.root, 0o777)
    code, out, err = fixed.tool(monkeypatch, capfd, *verb, "--cache-dir", cache.root)
    assert (code, out) == (3, "")
    assert "chmod go-w" in err
    assert _left(cache) == set(KEYS)


def _snapshot(root):
    return {
        p.relative_to(root): p.read_bytes() for p in pathlib.Path(root).rglob("*") if p.is_file() and not p.is_symlink()
    }


def test_k5_clear_touches_only_its_own_tree(tmp_path, monkeypatch, capfd):
    """Files of others beside, inside and behind links stay, byte for byte; entries and set-aside folders are gone."""
    fixed.stand_still(monkeypatch)
    home = tmp_path / "home"
    home.mkdir()
    (home / "precious.txt").write_text("mine")
    cache = fixed.fill(home / "cache")
    root = pathlib.Path(cache.root)
    (root / "notes.txt").write_text("mine, too")
    (root / "results").mkdir()
    (root / "results" / "table.csv").write_text("1,2")
    (root / "entries-v0" / "ab").mkdir(parents=True)
    (root / "entries-v0" / "ab" / "old").write_text("of another format")
    (root / "set-aside-v1" / "x-1").mkdir(parents=True)
    (root / "set-aside-v1" / "x-1" / "kernel.so").write_text("damaged")
    os.symlink(home, root / "link-to-home")
    shard = pathlib.Path(cache.entry(KEYS["plain"].digest)).parent
    os.symlink(home, shard / ("0" * 64))  # a link in the place of an entry of another shard
    os.symlink(home, shard / (KEYS["plain"].digest[:2] + "0" * 62))  # and one that looks like an entry
    before = _snapshot(home)
    mine = {p for p in before if p.parts[:2] == ("cache", "entries-v1") and len(p.parts) == 5}
    mine |= {p for p in before if "set-aside-v1" in p.parts}
    code, out, err = fixed.tool(monkeypatch, capfd, "clear", "--yes", "--cache-dir", root)
    assert (code, err) == (0, "")
    assert out.startswith("deleted ")
    after = _snapshot(home)
    gone, new = before.keys() - after.keys(), after.keys() - before.keys()
    assert gone == mine
    assert {p.parts[1] for p in new} <= {"locks-v1"}
    assert all(after[p] == before[p] for p in after.keys() & before.keys())
    assert list(digests(cache)) == []
    assert (home / "precious.txt").read_text() == "mine"
    assert os.listdir(root / "staging-v1") == []


def test_k5_clear_leaves_a_builders_staging_and_locks(cache, monkeypatch, capfd):
    staging = pathlib.Path(cache.root, "staging-v1", "live")
    staging.mkdir()
    (staging / "kernel.so").write_text("being written")
    os.utime(staging, (fixed.NOW, fixed.NOW))
    lock = pathlib.Path(cache.lock(KEYS["plain"].digest))
    cache.make_parents(str(lock))
    lock.write_text("{}")
    assert fixed.tool(monkeypatch, capfd, "clear", "--yes", "--cache-dir", cache.root)[0] == 0
    assert (staging / "kernel.so").read_text() == "being written"
    assert lock.exists()


def test_k5_clear_asks_and_nobody_there_to_answer_is_a_refusal(cache, monkeypatch, capfd):
    code, out, err = fixed.tool(monkeypatch, capfd, "clear", "--cache-dir", cache.root)
    assert (code, out) == (2, "")
    assert "say --yes" in err
    assert _left(cache) == set(KEYS)


@pytest.mark.processes
@pytest.mark.parametrize(("answer", "left"), [("y\n", 0), ("n\n", len(KEYS)), ("\n", len(KEYS))])
def test_k5_clear_asks_on_a_terminal(tmp_path, answer, left):
    import pty
    import subprocess
    import sys

    from support.process import environment

    cache = fixed.fill(tmp_path / "cache")
    parent, child = pty.openpty()
    code = f"import sys; sys.argv[1:] = ['clear', '--cache-dir', {cache.root!r}]\n"
    code += "from cache_tools.cli import entry\nentry()"
    process = subprocess.Popen([sys.executable, "-c", code], stdin=child, stdout=subprocess.PIPE,
                               stderr=subprocess.PIPE, env=environment())  # fmt: skip
    os.write(parent, answer.encode())
    out, err = process.communicate(timeout=60)
    os.close(parent)
    os.close(child)
    assert process.returncode == 0
    assert f"Delete {len(KEYS)} entries, ".encode() in err
    assert (b"nothing was deleted" in out) == (left > 0)
    assert len(list(digests(cache))) == left


@pytest.mark.parametrize("verb", [["clear", "--yes"], ["prune", "--max-size", "0"]])
def test_k5_a_folder_that_is_no_cache_is_not_cleared(tmp_path, monkeypatch, capfd, verb):
    folder = tmp_path / "documents"
    folder.mkdir(mode=0o700)
    (folder / "letter.txt").write_text("dear")
    code, out, err = fixed.tool(monkeypatch, capfd, *verb, "--cache-dir", folder)
    assert (code, out) == (3, "")
    assert "has no entries of muse_jit" in err
    assert [p.name for p in folder.iterdir()] == ["letter.txt"]


def test_very_many_are_not_named_one_by_one(tmp_path, monkeypatch, capfd):
    fixed.stand_still(monkeypatch)
    monkeypatch.setattr("cache_tools.verbs.prune._LINES", 3)
    layout = Layout(str(tmp_path / "cache"))
    for value in range(8):
        fixed.put(layout, fixed.key(value), age=value)
    out = fixed.tool(monkeypatch, capfd, "prune", "--max-size", "0", "--cache-dir", layout.root)[1]
    assert len(out.splitlines()) == 5
    assert "5 more (--json names all)" in out
