"""Launch shapes by size, bucket and architecture: the shipped table, the defaults, and what a table may not hold."""

import dataclasses
import json
import logging

import pytest
from hypothesis import given
from hypothesis import strategies as st

from muse_jit.constants import gemm_shapes
from muse_jit.constants.gemm_shapes import BUCKETS, OPROJ, UNPOOLER, bucket_of, default_shape, gemm_constants, shape_for
from muse_jit.constants.mailbox import Shape
from muse_jit.constants.small_m_gemm import SHARED_BYTES, GemmShape
from muse_jit.errors import ConstantsError

ARCHS = tuple(SHARED_BYTES)
ITEM = {
    "arch": "sm_90a", "n": 8192, "k": 1024, "rows": 8, "shape": {"tile_n": 64, "warps": 8, "m_tiles": 2},
    "us": 5.5, "torch_mm_us": 7.25, "device": "NVIDIA H200", "torch": "2.11",
}  # fmt: skip


def _table(*items):
    return json.dumps({"schema": 1, "entries": list(items)})


@pytest.mark.parametrize(
    ("rows", "bucket"), [(1, 8), (7, 8), (8, 8), (9, 16), (16, 16), (17, 32), (33, 64), (63, 64), (64, 64)]
)
def test_the_smallest_bucket_that_covers_the_rows(rows, bucket):
    assert bucket_of(rows) == bucket


def test_of_fewer_buckets_the_next_larger():
    assert [bucket_of(rows, (8, 64)) for rows in (8, 9, 64)] == [8, 64, 64]


@pytest.mark.parametrize(("rows", "most"), [(0, 64), (-1, 64), (65, 64)])
def test_rows_beyond_the_buckets(rows, most):
    with pytest.raises(ConstantsError, match=rf"^rows is {rows}; the small-M GEMM takes from 1 to {most}$"):
        bucket_of(rows)


def test_every_shipped_entry_is_a_possible_kernel_with_its_measurement():
    table = gemm_shapes.table()
    assert table
    for case, entry in table.items():
        assert case == (entry.arch, entry.n, entry.k, entry.rows)
        (c,) = gemm_constants(entry.n, entry.k, [entry.rows], entry.arch, pdl=True)
        assert {name: getattr(c, name) for name in GemmShape._fields} == entry.shape._asdict()
        assert (c.n, c.k, c.rows) == case[1:]
        assert 0 < entry.us < entry.torch_mm_us * 2
        assert entry.device
        assert entry.torch


def test_the_shipped_file_is_as_it_would_be_written():
    from importlib.resources import files

    text = files("muse_jit.constants").joinpath(gemm_shapes.FILE).read_text()
    assert gemm_shapes.table_text(gemm_shapes.table().values()) == text
    assert len(text.splitlines()) == len(gemm_shapes.table()) + 2


@given(
    n=st.integers(1, 1024).map(lambda v: 16 * v),
    k=st.integers(1, 512).map(lambda v: 32 * v),
    bucket=st.sampled_from(BUCKETS),
    arch=st.sampled_from(ARCHS),
    pdl=st.booleans(),
)
def test_the_default_is_valid_for_every_size(n, k, bucket, arch, pdl):
    shape = default_shape(n, k, bucket, arch)
    (c,) = gemm_constants(n, k, [bucket], arch, pdl=pdl, shape=shape)
    c.validate_for(arch)
    assert (c.n, c.k, c.rows, c.enable_pdl, c.release_early) == (n, k, bucket, pdl, pdl)
    assert default_shape(n, k, bucket, arch) == shape


@pytest.mark.parametrize("n", [8192, 2048, 1024, 512])
@pytest.mark.parametrize("arch", ARCHS)
def test_a_default_has_no_more_waves_of_rows_than_need_be(n, arch):
    """What the busiest SM reads is at most one tile of 16 rows more than a perfect division."""
    for bucket in BUCKETS:
        shape = default_shape(n, 4096, bucket, arch)
        busiest = -(-n // (shape.tile_n * gemm_shapes.SMS[arch])) * shape.tile_n
        assert busiest < n / gemm_shapes.SMS[arch] + 16


@pytest.mark.parametrize(
    ("n", "k", "arch", "message"),
    [
        (8200, 1024, "sm_90a", "n is 8200; the small-M GEMM needs a positive multiple of 16"),
        (0, 1024, "sm_90a", "n is 0; "),
        (8192, 1000, "sm_90a", "k is 1000; the small-M GEMM needs a positive multiple of 32"),
        (8192, -32, "sm_90a", "k is -32; "),
        (8192, 1024, "sm_80", "arch is 'sm_80'; the small-M GEMM has sm_90a, sm_100a, sm_103a, sm_120a"),
    ],
)
def test_sizes_that_no_shape_has(n, k, arch, message):
    with pytest.raises(ConstantsError, match=f"^{message}"):
        shape_for(n, k, 8, arch)


def test_a_tuned_case_gets_its_entry_and_another_says_once_that_it_is_not_tuned(monkeypatch, caplog):
    monkeypatch.setattr(gemm_shapes, "table", lambda: gemm_shapes.read_table(_table(ITEM)))
    gemm_shapes._say_untuned.cache_clear()
    with caplog.at_level(logging.INFO, "muse_jit"):
        chosen = shape_for(8192, 1024, 5, "sm_90a")
        assert (chosen.tuned, chosen.shape) == (True, GemmShape(64, 8, 2))
        assert (chosen.entry.us, chosen.entry.torch_mm_us) == (5.5, 7.25)
        assert caplog.records == []
        for rows in (9, 64, 9):
            chosen = shape_for(8192, 1024, rows, "sm_90a")
            assert (chosen.tuned, chosen.shape) == (False, default_shape(8192, 1024, bucket_of(rows), "sm_90a"))
        assert not shape_for(8192, 1024, 5, "sm_100a").tuned
    assert [r.getMessage().partition(":")[0] for r in caplog.records] == [
        "small-M GEMM [8192, 1024] on sm_90a",
        "small-M GEMM [8192, 1024] on sm_100a",
    ]
    gemm_shapes._say_untuned.cache_clear()


def test_one_constant_set_for_each_bucket_that_is_needed():
    sets = gemm_constants(8192, 1024, (33, 1, 2, 8), "sm_90a", pdl=False, shape=OPROJ)
    assert [c.rows for c in sets] == [8, 64]
    assert all((c.n, c.k, c.enable_pdl, c.release_early) == (8192, 1024, False, False) for c in sets)
    assert sets == gemm_constants(8192, 1024, (64, 3), "sm_90a", pdl=False, shape=UNPOOLER)
    with pytest.raises(ConstantsError, match=r"^rows is empty"):
        gemm_constants(8192, 1024, (), "sm_90a", pdl=True)


@pytest.mark.parametrize("shape", [OPROJ, GemmShape(64, 8, 2)])
def test_with_a_mailbox_all_sets_carry_it_and_nothing_else_changes(shape):
    plain = gemm_constants(8192, 1024, (1, 64), "sm_90a", pdl=True, shape=shape)
    assert [(c.publish_tp, c.transport, c.capacity) for c in plain] == [(0, "peer", 64)] * 2
    for mailbox in (Shape(8, 64, 8192), Shape(4, 96, 8192, "multicast")):
        sets = gemm_constants(8192, 1024, (1, 64), "sm_90a", pdl=True, shape=shape, mailbox=mailbox)
        published = {"publish_tp": mailbox.tp, "transport": mailbox.transport, "capacity": mailbox.capacity}
        assert [c.as_dict() for c in sets] == [{**c.as_dict(), **published} for c in plain]


@pytest.mark.parametrize(
    ("mailbox", "message"),
    [
        (Shape(8, 64, 4096), "^n is 8192; the mailbox that it is published into is 4096 wide$"),
        (Shape(3, 64, 8192), r"SmallMGemmConstants\.publish_tp is 3; "),
        (Shape(8, 32, 8192), r"SmallMGemmConstants\.capacity is 32; it must be from rows = 64 "),
    ],
)
def test_a_mailbox_that_does_not_fit_is_refused(mailbox, message):
    with pytest.raises(ConstantsError, match=message):
        gemm_constants(8192, 1024, (64,), "sm_90a", pdl=True, shape=OPROJ, mailbox=mailbox)


def test_one_shape_for_all_buckets_must_be_possible_for_each():
    shape = GemmShape(64, 8, 2)
    sets = gemm_constants(8192, 1024, (1, 64), "sm_90a", pdl=True, shape=shape)
    assert [(c.rows, c.tile_n, c.warps, c.m_tiles) for c in sets] == [(8, 64, 8, 2), (64, 64, 8, 2)]
    with pytest.raises(ConstantsError, match=r"SmallMGemmConstants\.n is 8200; "):
        gemm_constants(8200, 1024, (1,), "sm_90a", pdl=True, shape=shape)
    with pytest.raises(ConstantsError, match=r"stages is 2; a block would need .* sm_120a has 101376"):
        gemm_constants(8192, 4096, (1, 64), "sm_120a", pdl=True, shape=GemmShape(64, 32, 1, 8))


@pytest.mark.parametrize("shape", [OPROJ, UNPOOLER])
def test_a_layers_shapes_have_a_short_name(shape):
    assert tuple(shape[:3]) == (shape.layer, "tuned by rows", BUCKETS)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("{", "^gemm_shapes.json is not JSON: "),
        ("[]", "^gemm_shapes.json is not a table of schema 1$"),
        ('{"schema": 2, "entries": []}', "is not a table of schema 1"),
        ('{"schema": 1, "entries": {}}', "is not a table of schema 1"),
        (_table(ITEM, 1), "entry 1: it must have exactly the fields arch, n, k, rows, shape, us, torch_mm_us, "),
        (_table({**ITEM, "more": 1}), "entry 0: it must have exactly the fields"),
        (_table({**ITEM, "arch": "sm_80"}), "entry 0: arch is 'sm_80'; allowed: sm_90a"),
        (_table({**ITEM, "arch": ["sm_90a"]}), r"entry 0: arch is \['sm_90a'\]; it must be text"),
        (_table({**ITEM, "rows": 12}), "entry 0: rows is 12; allowed: 8, 16, 32, 64"),
        (_table({**ITEM, "n": 8200}), r"entry 0: SmallMGemmConstants\.n is 8200; "),
        (_table({**ITEM, "k": "1024"}), r"entry 0: SmallMGemmConstants\.k is '1024'; "),
        (_table({**ITEM, "shape": {"tile_n": 64, "warps": 8}}), "entry 0: shape must have tile_n, warps, m_tiles"),
        (_table({**ITEM, "shape": {**ITEM["shape"], "warps": 8.0}}), r"entry 0: SmallMGemmConstants\.warps is 8.0; "),
        (_table({**ITEM, "shape": {**ITEM["shape"], "tiles": 2}}), "entry 0: shape must have fields of tile_n, "),
        (_table({**ITEM, "shape": {**ITEM["shape"], "warps": 6}}), r"entry 0: SmallMGemmConstants\.\w+ is "),
        (_table({**ITEM, "us": 0}), "entry 0: us is 0; it must be positive microseconds"),
        (_table({**ITEM, "torch_mm_us": "7"}), "entry 0: torch_mm_us is '7'; it must be positive microseconds"),
        (_table({**ITEM, "us": float("inf")}), "entry 0: us is inf; "),
        (_table({**ITEM, "torch": 2.11}), "entry 0: torch is 2.11; it must be text"),
        (_table(ITEM, {**ITEM, "us": 6.0}), r"entry 1: sm_90a \[8192, 1024\] 8 is there twice"),
    ],
)  # fmt: skip
def test_a_damaged_table_is_refused_in_one_line(text, message):
    with pytest.raises(ConstantsError, match=message) as caught:
        gemm_shapes.read_table(text)
    assert "\n" not in str(caught.value)


def test_a_result_of_the_search_becomes_the_table(tmp_path):
    import gemm_table

    path = tmp_path / "table.json"
    other = {**ITEM, "n": 4096, "rows": 16}
    path.write_text(_table(ITEM, other))
    shapes = [{"us": 6.0, "tile_n": 64, "warps": 8, "m_tiles": 2},
              {"us": 5.123, "tile_n": 32, "warps": 4, "m_tiles": 2}]  # fmt: skip
    cases = [{"n": 8192, "k": k, "rows": 8, "torch_mm_us": 7.004, "shapes": shapes, "tried": 3} for k in (2048, 1024)]
    found = list(gemm_table.entries_of({"device": "NVIDIA H200", "torch": "2.14", "cases": cases}, "sm_90a"))
    assert gemm_table.write_table(found, path) == 3
    lines = path.read_text().splitlines()
    assert lines[0] == '{"schema": 1, "entries": ['
    assert lines[-1] == "]}"
    table = gemm_shapes.read_table(path.read_text())
    assert [case[1:] for case in table] == [(4096, 1024, 16), (8192, 1024, 8), (8192, 2048, 8)]
    kept, replaced, added = table.values()
    assert kept == gemm_shapes.read_table(_table(other)).popitem()[1]
    assert (replaced.us, replaced.torch_mm_us, replaced.torch) == (5.12, 7.0, "2.14")
    assert replaced.shape[:3] == added.shape[:3] == (32, 4, 2)
    assert gemm_table.write_table(found, path) == 3
    assert path.read_text().splitlines() == lines


def test_a_wrong_entry_is_not_written():
    entry = next(iter(gemm_shapes.table().values()))
    with pytest.raises(ConstantsError, match="rows is 12"):
        gemm_shapes.table_text([dataclasses.replace(entry, rows=12)])


def test_the_kernel_does_not_depend_on_the_table():
    """A measurement must not make kernels compile again."""
    from muse_jit.key.source import source_of

    source = source_of(
        "muse_jit.kernels.small_m_gemm:build", also="muse_jit.constants.small_m_gemm:SmallMGemmConstants"
    )
    assert "muse_jit.constants.small_m_gemm" in source.modules
    assert "muse_jit.constants.gemm_shapes" not in source.modules
