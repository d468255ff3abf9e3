"""Every verb's --json: one document, whose fields are those of cache_tools/JSON.md, no more and no less."""

import json
import pathlib
import re

import pytest
from support import fixed
from support.fixed import KEYS
from support.process import ROOT

from muse_jit.store.layout import Layout

PAGE = (ROOT / "cache_tools" / "JSON.md").read_text()
KINDS = {
    "text": str,
    "number": (int, float),
    "whole": int,
    "yes/no": bool,
    "null": type(None),
    "object": dict,
    "any": object,
}


def _documented(verb):
    """Path of a field to the kinds it may have; a field of kind object that is documented alone is free inside."""
    part = re.search(rf"^## {verb}\n(.*?)(?=^## |\Z)", PAGE, re.MULTILINE | re.DOTALL)[1]
    rows = re.findall(r"^\| `([^`]+)` \| ([^|]+) \|", part, re.MULTILINE)
    return {path: tuple(kind.strip() for kind in kinds.split(" or ")) for path, kinds in rows}


def _flat(value, fields, path=""):
    """Path to value for each leaf, lists as [], objects as far as the page describes them."""
    if isinstance(value, dict) and (path == "" or any(f.startswith(path + ".") for f in fields)):
        for name, inner in value.items():
            yield from _flat(inner, fields, f"{path}.{name}" if path else name)
    elif isinstance(value, list) and path not in fields:
        for inner in value:
            yield from _flat(inner, fields, path + "[]")
        if not value and not any(f.startswith(path + "[].") for f in fields):
            yield path + "[]", ...
        elif not value:
            yield path, ...
    else:
        yield path, value


@pytest.fixture
def run(tmp_path, monkeypatch, capfd):
    fixed.stand_still(monkeypatch)
    cache = fixed.fill(tmp_path / "cache")
    other = Layout(str(tmp_path / "other"))
    fixed.put(other, KEYS["plain"], content=b"other bytes")
    fixed.put(other, fixed.key(77))
    monkeypatch.setenv("MUSE_JIT_CACHE_DIR", cache.root)
    words = {"OTHER": other.root, "CACHE": cache.root, "FILE": str(tmp_path / "report.html")}

    def run(*arguments):
        code, out, err = fixed.tool(monkeypatch, capfd, *(words.get(a, a) for a in arguments), "--json")
        assert err == ""
        return code, json.loads(out)  # exactly one document

    return run


def _digest(name):
    return KEYS[name].digest


CONSTANTS = json.dumps({"kernel": "toy", "arch": "sm_90a", "constants": {"value": 9}})
CASES = {
    "ls": [(0, ["ls"])],
    "show": [(0, ["show", _digest("spilling")]), (1, ["show", _digest("bad_manifest")]),
             (0, ["show", _digest("spilling"), "--resources", "--sass"])],
    "stats": [(0, ["stats"])],
    "report": [(0, ["report", "FILE"])],
    "path": [(0, ["path"])],
    "explain": [(0, ["explain", CONSTANTS]), (0, ["explain", _digest("old_toolchain")]),
                (1, ["explain", _digest("bad_digest")]), (0, ["explain", "0123"])],
    "diff of entries": [(0, ["diff", _digest("plain"), _digest("spilling")])],
    "diff of caches": [(1, ["diff", "CACHE", "OTHER"]), (1, ["diff", "OTHER", "CACHE"])],
    "verify": [(1, ["verify"])],
    "doctor": [(0, ["doctor"])],
    "prune": [(0, ["prune", "--older-than", "30d", "--dry-run"])],
    "clear": [(0, ["clear", "--yes"])],
}  # fmt: skip


@pytest.mark.parametrize("verb", CASES)
def test_fields_are_those_of_the_page(verb, run, monkeypatch):
    sass = '.section .text.toy_kernel,"ax"\n /*0000*/ FADD R1, R2, R3 ;\n'
    monkeypatch.setattr("cache_tools.machine_code.sass", lambda artifact: sass)
    fields = _documented(verb)
    seen = {}
    for code, arguments in CASES[verb]:
        got, document = run(*arguments)
        assert got == code
        for path, value in _flat(document, fields):
            seen.setdefault(path, []).append(value)
    optional = {path for path in fields if path.partition("[]")[0].partition(".")[0] in _optional(verb)}
    empty = {path for path, values in seen.items() if all(v is ... or v is None for v in values)}
    lists = {path for path in empty if any(f.startswith(path + "[]") for f in fields)}
    assert set(seen) - set(fields) - lists == set()
    assert {p for p in fields if not _there(p, seen)} - optional == set()
    for path, values in ((p, v) for p, v in seen.items() if p in fields):
        kinds = tuple(KINDS[kind] for kind in fields[path])
        for value in values:
            assert value is ... or isinstance(value, kinds), path
            assert type(value) is not bool or bool in kinds or object in kinds, path


def _there(path, seen):
    """Whether a field was met; those below an empty list or a null were not, and are none the less."""
    above = {path[: m.start()] for m in re.finditer(r"\.|\[\]", path)}
    return path in seen or any(a in seen and (None in seen[a] or ... in seen[a]) for a in above | {path + "[]"})


def _optional(verb):
    return {"ptx"} if verb == "show" else set()


def test_every_verb_is_on_the_page_and_has_json():
    from cache_tools.cli import main

    verbs = set(main.list_commands(None))
    assert verbs == {name.partition(" ")[0] for name in CASES} | {"diff"}
    for name in verbs:
        options = {o for p in main.get_command(None, name).params for o in p.opts}
        assert {"--json", "--cache-dir"} <= options


def test_a_refused_call_prints_no_document(monkeypatch, capfd, tmp_path):
    fixed.stand_still(monkeypatch)
    cache = fixed.fill(tmp_path / "cache")
    for arguments in (["show", "zz"], ["explain", "{"], ["prune", "--older-than", "soon"], ["clear"]):
        code, out, err = fixed.tool(monkeypatch, capfd, *arguments, "--json", "--cache-dir", cache.root)
        assert (code, out) == (2, "")
        assert err.count("\n") == 1
        assert pathlib.Path(cache.entries).is_dir()
