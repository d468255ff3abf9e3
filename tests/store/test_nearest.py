import pathlib

import pytest
from support.entries import ARTIFACT, entry, key

from muse_jit.key.target import Target
from muse_jit.store.layout import Layout
from muse_jit.store.nearest import causes, nearest, nearest_each
from muse_jit.store.publish import publish

TOOLCHAIN = {"dsl": {"version": "2", "python": "bb"}, "tvm_ffi_abi": "0.1/00"}
OLD_TOOLCHAIN = {"dsl": {"version": "1", "python": "aa"}, "tvm_ffi_abi": "0.1/00"}
CONSTANTS = {"value": 1, "eps": 1e-5, "flag": True}


def _key(**changes):
    return key(**{"constants": CONSTANTS, "toolchain": TOOLCHAIN, **changes})


ASKED = _key()
OTHERS = {
    "other kernel": _key(kernel="other"),
    "three constants": _key(constants={"value": 2, "eps": 2e-5, "flag": False}),
    "two constants": _key(constants={**CONSTANTS, "value": 2, "flag": False}),
    "arch and constant": _key(constants={**CONSTANTS, "value": 2}, target=Target("sm_100a", 13, "x86_64")),
    "one constant": _key(constants={**CONSTANTS, "value": 2}),
    "toolchain": _key(toolchain=OLD_TOOLCHAIN),
    "arch": _key(target=Target("sm_100a", 13, "x86_64")),
}


def _layout(tmp_path, *names, created=None):
    layout = Layout(str(tmp_path / "cache"))
    for name in names:
        publish(layout, entry(OTHERS[name], created=(created or {}).get(name, 1000.0)), ARTIFACT)
    return layout


@pytest.mark.parametrize(
    ("there", "wins"),
    [
        (["three constants", "two constants"], "two constants"),
        (["two constants", "one constant"], "one constant"),
        (["arch and constant", "one constant"], "one constant"),
        (["one constant", "toolchain"], "toolchain"),  # many leaves, one cause, and the same constants
        (["arch", "toolchain"], "toolchain"),
        (["arch", "two constants"], "arch"),
        (["other kernel", "three constants"], "three constants"),
    ],
)
def test_the_fewest_causes_win_and_of_equals_the_same_constants(tmp_path, there, wins):
    for order in (there, there[::-1]):
        found = nearest(_layout(tmp_path / order[0], *order), ASKED.document)
        assert found[0].digest == OTHERS[wins].digest


def test_of_equally_near_ones_the_newest_wins(tmp_path):
    other = _key(constants={**CONSTANTS, "value": 3})
    layout = _layout(tmp_path, "one constant", created={"one constant": 5000.0})
    publish(layout, entry(other, created=4000.0), ARTIFACT)
    assert nearest(layout, ASKED.document)[0].digest == OTHERS["one constant"].digest


def test_differences_are_from_the_entry_to_what_is_asked(tmp_path):
    _, parts = nearest(_layout(tmp_path, "toolchain"), ASKED.document)
    assert [(d.part, d.old, d.new) for d in parts] == [
        ("toolchain.dsl.python", "aa", "bb"),
        ("toolchain.dsl.version", "1", "2"),
    ]
    assert causes(parts) == ["toolchain"]


def test_types_count(tmp_path):
    layout = Layout(str(tmp_path / "cache"))
    publish(layout, entry(_key(constants={**CONSTANTS, "flag": 1})), ARTIFACT)
    assert [(d.part, d.old, d.new) for d in nearest(layout, ASKED.document)[1]] == [("constants.flag", 1, True)]


def test_nothing_of_the_kernel_and_damaged_entries(tmp_path):
    layout = _layout(tmp_path, "other kernel", "one constant")
    pathlib.Path(layout.entry(OTHERS["one constant"].digest), "entry.json").write_text("{")
    assert nearest(layout, ASKED.document) is None
    assert nearest(Layout(str(tmp_path / "absent")), ASKED.document) is None


def test_its_own_entry_is_not_its_neighbour(tmp_path):
    layout = _layout(tmp_path, "two constants")
    publish(layout, entry(ASKED), ARTIFACT)
    assert nearest(layout, ASKED.document)[0].digest == OTHERS["two constants"].digest


def test_several_keys_with_one_pass(tmp_path, monkeypatch):
    from muse_jit.store import nearest as module

    layout = _layout(tmp_path, "one constant", "other kernel")
    passes = []
    real = module.listed
    monkeypatch.setattr(module, "listed", lambda layout: passes.append(1) or real(layout))
    documents = [
        ASKED.document,
        _key(kernel="other", constants={**CONSTANTS, "eps": 0.5}).document,
        key(kernel="?").document,
    ]
    found = nearest_each(layout, documents)
    assert [f and f[0].kernel for f in found] == ["toy", "other", None]
    assert passes == [1]
    assert nearest_each(layout, []) == []
    assert passes == [1]


def test_only_what_was_made_before(tmp_path):
    layout = _layout(tmp_path, "one constant", "three constants", created={"one constant": 5000.0})
    assert nearest(layout, ASKED.document)[0].digest == OTHERS["one constant"].digest
    assert nearest(layout, ASKED.document, before=5000.0)[0].digest == OTHERS["three constants"].digest
    assert nearest(layout, ASKED.document, before=1000.0) is None
