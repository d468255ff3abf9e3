import itertools
import json
import pathlib

import pytest
from support.entries import ARTIFACT, entry, key
from support.process import command

from muse_jit.store.layout import Layout
from muse_jit.store.publish import publish

pytestmark = pytest.mark.processes

HEAVY = ("torch", "tvm_ffi", "cutlass", "filelock", "rich", "subprocess")


@pytest.fixture
def cache(tmp_path):
    layout = Layout(str(tmp_path / "cache"))
    for value in range(3):
        publish(layout, entry(key(value)), ARTIFACT)
    publish(layout, entry(key(9, kernel="other\x1b[31m")), ARTIFACT)
    return layout


def _cache(layout, *arguments, **variables):
    return command("muse-cache", *arguments, "--cache-dir", layout.root, block=HEAVY, **variables)


def test_ls_is_a_table(cache):
    code, out, err = _cache(cache, "ls")
    assert code == 0, err
    lines = out.splitlines()
    assert lines[0].split() == ["DIGEST", "KERNEL", "ARCH", "SIZE", "COMPILE", "AGE", "USED", "CONSTANTS"]
    assert len(lines) == 6
    assert lines[-1].startswith("4 entries, ")
    row = next(line for line in lines if line.startswith(key(2).digest[:12]))
    assert row.split()[1:3] == ["toy", "sm_90a"]
    assert "0.50 s" in row
    assert row.endswith("value=2")
    assert "\x1b" not in out


def test_ls_filters(cache):
    rows = json.loads(_cache(cache, "ls", "--json", "--kernel", "toy")[1])["entries"]
    assert [r["constants"]["value"] for r in sorted(rows, key=lambda r: r["constants"]["value"])] == [0, 1, 2]
    assert json.loads(_cache(cache, "ls", "--json", "--arch", "sm_100a")[1])["entries"] == []


def test_damaged_entries_are_listed_as_such(cache):
    pathlib.Path(cache.entry(key(1).digest), "entry.json").write_text("{")
    code, out, _ = _cache(cache, "ls", "--json")
    assert code == 0
    damaged = [e for e in json.loads(out)["entries"] if e["damaged"]]
    assert [(d["digest"], d["kernel"]) for d in damaged] == [(key(1).digest, None)]
    assert damaged[0]["damaged"].startswith("bad_manifest: ")
    assert "(damaged)" in _cache(cache, "ls")[1]
    code, out, _ = _cache(cache, "show", key(1).digest[:10])
    assert code == 1
    assert "bad_manifest" in out


def test_show_decodes_an_entry(cache):
    code, out, err = _cache(cache, "show", key(2).digest[:8].upper())
    assert code == 0, err
    for words in (key(2).digest, "value                        2", "REGISTERS", "arch sm_90a", "0.1/00"):
        assert words in out
    document = json.loads(_cache(cache, "show", key(2).digest, "--json")[1])
    assert document["manifest"]["key"] == key(2).document
    assert document["path"] == cache.entry(key(2).digest)


def test_show_keeps_control_characters_from_the_terminal(cache):
    out = _cache(cache, "show", key(9, kernel="other\x1b[31m").digest)[1]
    assert "other?[31m" in out
    assert "\x1b" not in out


@pytest.mark.parametrize(
    ("arguments", "code", "words"),
    [
        (("show", "zz"), 2, "no entry's digest begins with 'zz'"),
        (("show", ""), 2, "no entry's digest begins with ''"),
        (("show",), 2, "PREFIX"),
        (("nonsense",), 2, "nonsense"),
        (("ls", "--cache-dir", "/nowhere"), 3, "there is no cache folder /nowhere; fill one with: muse-jit warmup"),
        (("show", "ab", "--cache-dir", "/nowhere"), 3, "there is no cache folder /nowhere"),
        (("ls", "--cache-dir", ""), 2, "the folder's name is empty"),
    ],
)
def test_wrong_use_is_one_line_and_an_exit_code(cache, arguments, code, words):
    got, out, err = command("muse-cache", *arguments, MUSE_JIT_CACHE_DIR=cache.root)
    assert (got, out) == (code, "")
    assert err.startswith("muse-cache: ")
    assert err.count("\n") == 1
    assert words in err


def test_an_ambiguous_prefix_names_some(tmp_path):
    layout = Layout(str(tmp_path / "cache"))
    for value in range(40):
        publish(layout, entry(key(value)), ARTIFACT)
    first = sorted(key(v).digest for v in range(40))
    prefix = next(a[0] for a, b in itertools.pairwise(first) if a[0] == b[0])
    code, _, err = _cache(layout, "show", prefix)
    assert code == 2
    assert f"entries begin with '{prefix}'" in err


def test_path_and_why(cache, tmp_path):
    assert _cache(cache, "path")[1] == f"{cache.root}\n"
    document = json.loads(command("muse-cache", "path", "--json", VLLM_CACHE_ROOT=tmp_path)[1])
    assert document == {"cache_dir": f"{tmp_path}/muse_jit", "origin": "VLLM_CACHE_ROOT", "exists": False}


def test_listing_runs_nothing_it_finds(cache):
    folder = pathlib.Path(cache.entry(key(1).digest))
    (folder / "sitecustomize.py").write_text("raise SystemExit('ran')")
    (folder / "kernel.so").write_bytes(b"#!/bin/sh\ntouch /nowhere\n")
    assert _cache(cache, "ls")[0] == 0
