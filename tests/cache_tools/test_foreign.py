"""Damaged and foreign entries of every sort: no verb crashes, each is listed as such, verify exits with 1."""

import json
import os
import pathlib
import shutil

import pytest
from support import fixed
from support.fixed import KEYS

KEY = KEYS["plain"]


def _manifest(**changes):
    def change(folder):
        document = json.loads((folder / "entry.json").read_text())
        for path, value in changes.items():
            inner = document
            *above, last = path.split("__")
            for name in above:
                inner = inner[name]
            inner[last] = value
        (folder / "entry.json").write_text(json.dumps(document))

    return change


def _text(text):
    return lambda folder: (folder / "entry.json").write_bytes(text)


def _instead(make):
    def change(folder):
        shutil.rmtree(folder)
        make(folder)

    return change


ODD = {
    "empty manifest": _text(b""),
    "a list": _text(b"[]"),
    "deep nesting": _text(b"[" * 100_000),
    "not UTF-8": _text(b"\xff\xfe{}"),
    "NaN": _manifest(created=float("nan")),
    "huge numbers": _manifest(created=1e308, compile_seconds=1e308),
    "negative numbers": _manifest(created=-1e12, compile_seconds=-5.0, link_seconds=-1.0),
    "absurd sizes": _manifest(artifact_size=10**30),
    "resources of odd kinds": _manifest(resources=[{"name": 5, "registers": "many", "code_bytes": None}, {}]),
    "no resources": _manifest(resources=[]),
    "another schema": _manifest(schema=2),
    "schema of a strange kind": _manifest(schema={"a": []}),
    "key without constants": _manifest(key={"kernel": "toy", "target": {"arch": "sm_90a"}}),
    "control characters": _manifest(created_by="\x1b]0;title\x07\n\r"),
    "another key": _manifest(key=KEYS["used"].document, digest=KEYS["used"].digest),
    "manifest a folder": lambda f: [(f / "entry.json").unlink(), (f / "entry.json").mkdir()],
    "manifest a link to a secret": lambda f: [
        (f / "entry.json").unlink(),
        (f / "entry.json").symlink_to("/etc/passwd"),
    ],
    "manifest a pipe": lambda f: [(f / "entry.json").unlink(), os.mkfifo(f / "entry.json")],
    "library a pipe": lambda f: [(f / "kernel.so").unlink(), os.mkfifo(f / "kernel.so")],
    "an empty folder": _instead(lambda f: f.mkdir()),
    "a file": _instead(lambda f: f.write_text("x")),
    "a link to nowhere": _instead(lambda f: f.symlink_to("/nowhere")),
    "a link to a folder": _instead(lambda f: f.symlink_to("/etc")),
    "more files and folders": lambda f: [(f / "extra").write_text("x"), (f / "sub").mkdir(), (f / "sub" / "y").touch()],
}
SOUND = {"huge numbers", "negative numbers", "resources of odd kinds", "no resources", "control characters",
         "more files and folders"}  # fmt: skip

CONSTANTS = json.dumps({"kernel": "toy", "arch": "sm_90a", "constants": {"value": 1}})
VERBS = [
    ["ls"], ["ls", "--tree"], ["ls", "--sort", "used", "--toolchain", "stale"], ["stats"], ["show", KEY.digest],
    ["show", KEY.digest, "--resources"], ["verify"], ["explain", KEY.digest], ["explain", CONSTANTS],
    ["diff", KEY.digest, KEYS["spilling"].digest], ["diff", "CACHE", "OTHER"], ["report", "REPORT"], ["doctor"],
    ["prune", "--older-than", "1d", "--dry-run"], ["prune", "--damaged", "--dry-run"], ["prune", "--max-size", "20K"],
    ["clear", "--yes"],
]  # fmt: skip


@pytest.mark.parametrize("kind", ODD)
def test_no_verb_crashes_whatever_an_entry_is(tmp_path, monkeypatch, capfd, kind):
    fixed.stand_still(monkeypatch)
    monkeypatch.setattr("cache_tools.machine_code.sass", lambda artifact: "")
    monkeypatch.setattr("cache_tools.health_machine.machine_checks", lambda *_: [])
    caches = {}
    for name in ("CACHE", "OTHER"):
        caches[name] = layout = fixed.fill(tmp_path / name)
        ODD[kind](pathlib.Path(layout.entry(KEY.digest)))
    root = caches["CACHE"].root
    words = {"CACHE": root, "OTHER": caches["OTHER"].root, "REPORT": str(tmp_path / "r.html")}
    for verb in VERBS:
        for as_json in ([], ["--json"]):
            arguments = [*(words.get(a, a) for a in verb), "--cache-dir", root, *as_json]
            code, out, err = fixed.tool(monkeypatch, capfd, *arguments)
            assert code in (0, 1, 2), (verb, err)
            assert err.count("\n") <= 1
            assert "\x1b" not in out + err
            if as_json and code < 2 and not err:
                json.loads(out)
            if verb == ["ls"] and as_json:
                listed = {e["digest"]: e["damaged"] for e in json.loads(out)["entries"]}
                assert bool(listed.get(KEY.digest)) == (kind not in SOUND)
            if verb == ["verify"]:
                assert code == 1  # three others are damaged in any case
                assert (KEY.digest[:12] in out) or as_json or kind in SOUND


@pytest.mark.parametrize("kind", sorted(set(ODD) - SOUND))
def test_verify_exits_with_1_for_that_one_alone(tmp_path, monkeypatch, capfd, kind):
    from muse_jit.store.layout import Layout

    layout = Layout(str(tmp_path / "cache"))
    fixed.put(layout, KEY)
    fixed.put(layout, KEYS["used"])
    ODD[kind](pathlib.Path(layout.entry(KEY.digest)))
    code, out, err = fixed.tool(monkeypatch, capfd, "verify", "--json", "--cache-dir", layout.root)
    assert (code, err) == (1, "")
    bad = [e["digest"] for e in json.loads(out)["entries"] if e["status"] != "ok"]
    assert bad == [KEY.digest]
