"""explain: what it takes, and that the answer is what a person would say."""

import json
import os
import pathlib

import pytest
from support import fixed
from support.fixed import KEYS

CONSTANTS = {"kernel": "toy", "arch": "sm_90a", "constants": {"value": 1}}


@pytest.fixture
def cache(tmp_path, monkeypatch):
    fixed.stand_still(monkeypatch)
    return fixed.fill(tmp_path / "cache")


@pytest.fixture
def explain(cache, monkeypatch, capfd):
    def explain(*arguments):
        code, out, err = fixed.tool(monkeypatch, capfd, "explain", *arguments, "--json", "--cache-dir", cache.root)
        return code, json.loads(out)["kernels"] if out else [], err

    return explain


def _constants(**changes):
    return json.dumps({**CONSTANTS, **changes})


def test_constants_as_text_as_a_file_and_in_a_plan_give_the_same(explain, tmp_path):
    text = _constants()
    (tmp_path / "constants.json").write_text(text)
    plan = {"schema": 1, "kernels": [CONSTANTS]}
    (tmp_path / "plan.json").write_text(json.dumps(plan))
    answers = [explain(text), explain(tmp_path / "constants.json"), explain("--plan", tmp_path / "plan.json"),
               explain(tmp_path / "plan.json")]  # fmt: skip
    assert all(a == answers[0] for a in answers)
    code, (found,), err = answers[0]
    assert (code, err, found["status"], found["digest"]) == (0, "", "hit", KEYS["plain"].digest)


def test_each_part_that_changes_is_named_old_and_new(explain):
    code, (found,), _ = explain(_constants(constants={"value": 1, "behaviour": "crash"}))
    assert (code, found["status"], found["reason"]) == (0, "miss", "absent")
    assert found["differences"] == [{"part": "constants.behaviour", "old": "ok", "new": "crash"}]
    _, (found,), _ = explain(_constants(), "--arch", "sm_100a")
    assert found["differences"][0]["part"] == "target.arch"
    assert found["differences"][0]["new"] == "sm_100a"
    assert found["arch"] == "sm_100a"


def test_after_an_upgrade_of_the_toolchain_the_old_entry_says_why(cache, explain, monkeypatch):
    """The question of a Monday morning: everything recompiled."""
    from muse_jit.key.toolchain import Toolchain

    newer = {**fixed.PARTS, "nvidia-cutlass-dsl": {"version": "4.9.0", "python": "99" * 32}}
    monkeypatch.setattr("cache_tools.standing.identify", lambda *_, **__: Toolchain(13, "x86_64", newer, "installed"))
    _, (found,), _ = explain(_constants())
    assert (found["status"], found["nearest"]) == ("miss", KEYS["plain"].digest)
    parts = {d["part"]: (d["old"], d["new"]) for d in found["differences"]}
    assert parts["toolchain.nvidia-cutlass-dsl.version"] == ("4.8.1", "4.9.0")
    assert set(parts) == {"toolchain.nvidia-cutlass-dsl.version", "toolchain.nvidia-cutlass-dsl.python"}
    _, (found,), _ = explain(KEYS["plain"].digest[:10])
    assert (found["status"], found["reason"]) == ("dead", "not_asked_for")
    assert {d["part"] for d in found["differences"]} == set(parts)


def test_why_a_kernel_that_is_there_was_compiled(cache, explain):
    """Asked after the fact, with the digest that the warm-up printed: what was there before it, and what changed."""
    _, (found,), _ = explain(KEYS["plain"].digest)
    assert found["status"] == "hit"
    assert found["nearest"] == KEYS["old_toolchain"].digest  # of the same constants, and older
    assert {d["part"].rpartition(".")[0] for d in found["differences"]} == {"toolchain.nvidia-cutlass-dsl"}
    _, (oldest,), _ = explain(KEYS["other_kernel"].digest)
    assert (oldest["status"], oldest["nearest"]) == ("hit", None)


def test_compile_options_of_the_environment_count(explain, monkeypatch):
    monkeypatch.setenv("MUSE_JIT_COMPILE_OPTIONS", "LINEINFO=1")
    _, (found,), _ = explain(_constants())
    assert found["differences"] == [{"part": "options.LINEINFO", "old": "(absent)", "new": "1"}]


@pytest.mark.parametrize("name", ["bad_digest", "bad_manifest", "incomplete"])
def test_a_damaged_entry_is_a_miss_with_its_reason_and_exit_code_1(explain, name):
    value = {"bad_digest": 6, "bad_manifest": 7, "incomplete": 8}[name]
    for what in (KEYS[name].digest, _constants(constants={"value": value})):
        code, (found,), err = explain(what)
        assert (code, err) == (1, "")
        assert (found["status"], found["reason"]) == ("miss", name)


def test_a_digest_of_a_family_that_nothing_registers(explain):
    code, (found,), _ = explain(KEYS["other_kernel"].digest)
    assert (code, found["status"]) == (0, "hit")
    assert "cannot be told: no kernel family" in found["detail"]


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ([], "explain takes one of these"),
        (["ab", "--plan", "x"], "explain takes one of these"),
        (["nonsense.json"], "is neither a digest's first digits, JSON such as"),
        (["{"], "not JSON"),
        (["{}"], "kernel and constants are needed"),
        (['{"kernel": "toy", "constants": []}'], "kernel and constants are needed"),
        (['{"kernel": "nobody", "arch": "sm_90a", "constants": {}}'], "no kernel family 'nobody'"),
        (['{"kernel": "toy", "arch": "sm_90a", "constants": {"value": "x"}}'], "must be of type int"),
        (['{"kernel": "toy", "arch": "sm_1", "constants": {}}'], "GPU architecture 'sm_1'"),
        (['{"kernel": "toy", "arch": 7, "constants": {}}'], "GPU architecture 7"),
        (["--plan", "/nowhere.json"], "/nowhere.json"),
        (["/"], "Is a directory"),
    ],
)
def test_what_it_cannot_take_is_one_line(explain, arguments, words):
    code, found, err = explain(*arguments)
    assert (code, found) == (2, [])
    assert words in err
    assert err.count("\n") == 1


def test_without_an_architecture_the_device_is_asked(explain, monkeypatch):
    code, _, err = explain('{"kernel": "toy", "constants": {"value": 1}}')
    assert code == 2
    assert "--arch" in err
    monkeypatch.setattr("cache_tools.wanted.device_arch", lambda: "sm_90a")
    code, (found,), _ = explain('{"kernel": "toy", "constants": {"value": 1}}')
    assert (code, found["status"]) == (0, "hit")


def test_an_ambiguous_prefix_names_some(cache, explain):
    twin = pathlib.Path(cache.entry(KEYS["plain"].digest)[:-1] + ("0" if KEYS["plain"].digest[-1] != "0" else "1"))
    os.mkdir(twin)
    code, _, err = explain(KEYS["plain"].digest[:20])
    assert code == 2
    assert "2 entries begin with" in err


def test_where_no_compiler_is_installed_the_caches_record_serves(tmp_path, settings):
    """The key is made of what toolchain.json says, as a service on such a machine makes it."""
    from support.process import run

    from muse_jit.constants.row_norm import RowNormConstants
    from muse_jit.key.toolchain import identify
    from muse_jit.service import JitService
    from muse_jit.store.publish import record_toolchain

    service = JitService("sm_90a", settings)
    constants = RowNormConstants(hidden=64, eps=1e-5, has_weight=True)
    fixed.put(service.layout, service.key_of(constants)[1])
    record_toolchain(service.layout, identify(None, os.uname().machine), fixed.NOW)
    text = json.dumps({"kernel": "row_norm", "arch": "sm_90a", "constants": constants.as_dict()})
    code = "import muse_jit.key.toolchain as t, muse_jit.key.installed as i\n"
    code += "t.distributions = lambda *a, **k: {}\n"
    code += f"import sys; sys.argv[1:] = ['explain', {text!r}, '--json', '--cache-dir', {service.layout.root!r}]\n"
    code += "from cache_tools.cli import entry\nentry()"
    (found,) = json.loads(run(code, block=("torch", "tvm_ffi", "cutlass")))["kernels"]
    assert (found["status"], found["digest"]) == ("hit", service.key_of(constants)[1].digest)
