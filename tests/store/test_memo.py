"""memo.json: what it saves, that it cannot be wrong, and that it costs nothing when it is lost."""

import ast
import json
import os
import pathlib

import pytest
from support import toy

from muse_jit.key.installed import Distribution
from muse_jit.key.memo import Memo
from muse_jit.key.source import source_of
from muse_jit.service import JitService
from muse_jit.store.layout import Layout
from muse_jit.store.memo import load_memo, save_memo

pytestmark = pytest.mark.processes


@pytest.fixture
def layout(tmp_path):
    layout = Layout(str(tmp_path / "cache"))
    layout.create()
    return layout


def _forbidden(*arguments, **named):
    raise AssertionError("it is in the memo")


def test_a_result_is_found_by_the_bytes_alone():
    memo = Memo({})
    assert memo.get("kind", b"one", lambda: [1]) == [1]
    assert memo.get("kind", b"one", _forbidden) == [1]
    assert memo.get("kind", b"two", lambda: [2]) == [2]
    assert memo.get("other", b"one", lambda: [3]) == [3]
    assert Memo(memo.new).get("kind", b"one", _forbidden) == [1]


def test_after_a_publish_the_next_process_parses_no_source_and_reads_no_table(settings, monkeypatch):
    first = JitService("sm_90a", settings)
    constants = toy.ToyConstants(value=1)
    first.obtain(constants)
    monkeypatch.setattr(ast, "parse", _forbidden)
    monkeypatch.setattr(Distribution, "recorded_hashes", _forbidden)
    again = JitService("sm_90a", settings)
    assert again.key_of(constants)[1].digest == first.key_of(constants)[1].digest
    assert again.toolchain == first.toolchain
    assert again.memo.new == {}


def test_the_digest_is_the_same_with_and_without_a_memo(tmp_path, monkeypatch):
    module = tmp_path / "memo_kernel.py"
    module.write_text("import math\nfrom memo_helper import x\ndef build(c, t): return x\n")
    (tmp_path / "memo_helper.py").write_text("x = 1\n")
    path = [str(tmp_path)]
    plain = source_of("memo_kernel:build", path)
    memo = Memo({})
    assert source_of("memo_kernel:build", path, memo=memo) == plain
    known = Memo(json.loads(json.dumps(memo.new)))
    assert source_of("memo_kernel:build", path, memo=known) == plain
    assert known.new == {}
    (tmp_path / "memo_helper.py").write_text("x = 2\n")
    edited = source_of("memo_kernel:build", path, memo=known)
    assert edited == source_of("memo_kernel:build", path)
    assert edited.digest != plain.digest
    (tmp_path / "memo_helper.py").unlink()  # how names resolve is never taken from the memo
    assert source_of("memo_kernel:build", path, memo=known) == source_of("memo_kernel:build", path)


def test_it_is_read_back_and_added_to(layout):
    assert load_memo(layout) == {}
    assert save_memo(layout, {"a 1": [1]}) == {"a 1": [1]}
    assert save_memo(layout, {"b 2": [2]}) == {"a 1": [1], "b 2": [2]}
    assert load_memo(layout) == {"a 1": [1], "b 2": [2]}
    assert os.stat(layout.memo).st_mode & 0o777 == 0o600


def test_any_flipped_bit_and_any_cut_is_no_memo(layout):
    save_memo(layout, {"a 1": ["digest", []]})
    data = pathlib.Path(layout.memo).read_bytes()
    for position in range(len(data)):
        for bad in (data[:position], data[:position] + bytes([data[position] ^ 1]) + data[position + 1 :]):
            pathlib.Path(layout.memo).write_bytes(bad)
            assert load_memo(layout) in ({}, {"a 1": ["digest", []]})
    pathlib.Path(layout.memo).write_bytes(b"[]\n[]")
    assert load_memo(layout) == {}


def test_a_folder_of_somebody_else_and_a_link_give_no_memo(layout, tmp_path):
    save_memo(layout, {"a 1": [1]})
    os.chmod(layout.root, 0o777)
    assert load_memo(layout) == {}
    os.chmod(layout.root, 0o700)
    elsewhere = tmp_path / "elsewhere"
    os.rename(layout.memo, elsewhere)
    os.symlink(elsewhere, layout.memo)
    assert load_memo(layout) == {}


def test_one_that_grew_too_large_begins_anew(layout):
    save_memo(layout, {"big 1": "x" * (2 << 20)})
    assert save_memo(layout, {"a 1": [1]}) == {"a 1": [1]}


def test_a_damaged_memo_costs_a_parse_and_no_kernel(settings):
    first = JitService("sm_90a", settings)
    constants = toy.ToyConstants(value=1)
    first.obtain(constants)
    pathlib.Path(first.layout.memo).write_bytes(b"\0" * 100)
    service = JitService("sm_90a", settings.with_options(mode="forbid"))
    assert service.get(constants)() == 1
    assert pathlib.Path(first.layout.memo).read_bytes() == b"\0" * 100  # a hit writes nothing
