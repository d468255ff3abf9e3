"""The key of now is the service's key; and what of an entry is not of now."""

import dataclasses

import pytest
from support import fixed, toy
from support.entries import entry

from cache_tools.standing import Standing, Standings
from cache_tools.today import Today
from muse_jit.constants.row_norm import RowNormConstants
from muse_jit.errors import ConstantsError, ToolchainError, UsageError
from muse_jit.key.toolchain import identify
from muse_jit.service import JitService
from muse_jit.store.entry import Entry
from muse_jit.store.layout import Layout

ROW_NORM = RowNormConstants(hidden=8192, eps=1e-5, has_weight=True)


def _today(settings):
    layout = Layout(settings.cache_dir)
    return Today(settings, Standings(layout)), Standings(layout)


@pytest.mark.parametrize("constants", [ROW_NORM, toy.ToyConstants(value=3)], ids=["row_norm", "toy"])
@pytest.mark.parametrize("options", [(), (("LINEINFO", "1"),)], ids=["plain", "with option"])
def test_the_key_is_the_services(settings, constants, options):
    settings = dataclasses.replace(settings, compile_options=options)
    expected = JitService("sm_90a", settings).key_of(constants)[1]
    today, _ = _today(settings)
    assert today.key(constants, "sm_90a").digest == expected.digest
    again = today.key_of_entry(entry(expected))
    assert (again[1], again[2].digest) == (constants, expected.digest)


def test_standings(settings):
    key = JitService("sm_90a", settings).key_of(ROW_NORM)[1]
    _, standings = _today(settings)
    other = {**key.toolchain, "tvm_ffi_abi": "9.9/00"}
    for change, expected in (
        ({}, Standing.CURRENT),
        ({"toolchain": other}, Standing.TOOLCHAIN),
        ({"source": "00"}, Standing.SOURCE),
        ({"build": "muse_jit.kernels.row_norm:other"}, Standing.SOURCE),
        ({"toolchain": other, "source": "00"}, Standing.TOOLCHAIN),
        ({"kernel": "nobody's"}, Standing.UNKNOWN),
    ):
        assert standings.of(entry(dataclasses.replace(key, **change))) == expected, change


def test_a_recipe_of_another_version_is_another_source(settings):
    key = JitService("sm_90a", settings).key_of(ROW_NORM)[1]
    made = entry(key)
    older = dataclasses.replace(made, key={**made.key, "recipe": made.key["recipe"] + 1})
    assert _today(settings)[1].of(older) == Standing.SOURCE


def test_a_cuda_major_that_is_not_installed_beside_one_that_is(settings, monkeypatch):
    def only_13(cuda, host, **kwargs):
        if cuda == 12:
            raise ToolchainError("no compiler for CUDA 12 is installed")
        return identify(cuda, host, **kwargs)

    monkeypatch.setattr("cache_tools.standing.identify", only_13)
    _, standings = _today(settings)
    assert standings.installed(12, "x86_64") == ""
    assert standings.installed(13, "x86_64")


def test_where_nothing_is_installed_nothing_is_called_dead(settings, monkeypatch):
    def nothing(cuda, host, **_):
        raise ToolchainError("no compiler is installed")

    monkeypatch.setattr("cache_tools.standing.identify", nothing)
    monkeypatch.setattr("muse_jit.key.toolchain.installed_cuda_majors", lambda: ())
    today, standings = _today(settings)
    made = entry(fixed.key(1))
    assert standings.of(made) in (Standing.UNKNOWN, Standing.SOURCE)
    assert standings.installed(13, "x86_64") is None
    assert standings.why_unknown == "no compiler is installed"
    with pytest.raises(ToolchainError):
        today.key(ROW_NORM, "sm_90a")
    assert not today.installed()


@pytest.mark.parametrize(
    ("change", "error"),
    [
        ({"kernel": "nobody's"}, UsageError),
        ({"constants": {"value": "text"}}, UsageError),
        ({"constants": {"nonsense": 1}}, UsageError),
        ({"target": {"arch": "sm_1", "cuda": 13, "host": "x86_64"}}, UsageError),
        ({"target": {"arch": "sm_90a"}}, UsageError),
        ({"options": {"NONSENSE": "1"}}, UsageError),
        ({"options": {"LINEINFO": 1}}, None),
    ],
)
def test_what_an_entry_may_say_is_an_error_with_a_name_never_a_crash(settings, change, error):
    made = entry(fixed.key(1))
    odd = Entry(**{**{f.name: getattr(made, f.name) for f in dataclasses.fields(Entry)}, "key": {**made.key, **change}})
    today, _ = _today(settings)
    if error is None:
        today.key_of_entry(odd)
    else:
        with pytest.raises(error):
            today.key_of_entry(odd)


def test_constants_that_are_not_possible_there(settings):
    with pytest.raises((ConstantsError, UsageError)):
        _today(settings)[0].key(ROW_NORM, "sm_1")
