"""Filters and orders of `ls`, which `prune` shares."""

import json

import pytest
from support import fixed
from support.fixed import KEYS


@pytest.fixture
def ls(tmp_path, monkeypatch, capfd):
    fixed.stand_still(monkeypatch)
    cache = fixed.fill(tmp_path / "cache")
    names = {key.digest: name for name, key in KEYS.items()}

    def ls(*arguments):
        code, out, err = fixed.tool(monkeypatch, capfd, "ls", "--json", "--cache-dir", cache.root, *arguments)
        assert (code, err) == (0, "")
        return [names[e["digest"]] for e in json.loads(out)["entries"]]

    return ls


SOUND = {"plain", "used", "other_arch", "spilling", "old_toolchain", "old_source", "bad_digest"}  # of toys, by manifest


@pytest.mark.parametrize(
    ("options", "names"),
    [
        (["--kernel", "toy"], SOUND),
        (["--kernel", "gemm\x1b[31m"], {"other_kernel"}),
        (["--arch", "sm_103a"], {"other_arch"}),
        (["--kernel", "toy", "--arch", "sm_103a"], {"other_arch"}),
        (["--older-than", "30d"], {"old_toolchain"}),  # `used` is 40 days old and was used yesterday
        (["--older-than", "4d"], {"old_toolchain", "old_source", "other_kernel"}),
        (["--newer-than", "12h"], {"spilling"}),
        (["--newer-than", "2w", "--older-than", "36h"], {"plain", "other_arch", "other_kernel"}),
        (["--toolchain", "stale"], {"old_toolchain"}),
        (["--toolchain", "current"], (SOUND - {"old_toolchain"}) | {"other_kernel"}),
        (["--smaller-than", "2K"], {"bad_manifest", "incomplete"}),
        (["--larger-than", "1M"], set()),
        (["--larger-than", "2K"], SOUND | {"other_kernel"}),
    ],
)
def test_filters(ls, options, names):
    assert set(ls(*options)) == names


def test_a_toolchain_by_its_first_digits(ls):
    from muse_jit.key.encoding import key_digest

    assert ls("--toolchain", key_digest(fixed.OLD_PARTS)[:6].upper()) == ["old_toolchain"]


@pytest.mark.parametrize(
    ("sort", "first", "last"),
    [
        ("age", "old_toolchain", "spilling"),
        ("used", "old_toolchain", "spilling"),
        ("compile", "other_kernel", None),
        ("arch", "other_arch", None),
        ("kernel", "other_kernel", None),
    ],
)
def test_orders(ls, sort, first, last):
    order = ls("--sort", sort)
    assert set(order[:2]) == {"bad_manifest", "incomplete"}  # damaged ones first, whatever the order
    assert order[2] == first
    assert last in (None, order[-1])
    assert ls("--sort", sort, "--reverse") == order[::-1]


@pytest.mark.parametrize("sort", ["size", "digest"])
def test_orders_by_size_and_digest(ls, sort):
    assert len(ls("--sort", sort)) == len(KEYS)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (["--older-than", "soon"], "must be an age such as 90s, 30min, 12h, 30d or 2w"),
        (["--larger-than", "big"], "must be a size such as 500M, 2G"),
        (["--toolchain", "new"], "must be stale, current, or the first digits"),
        (["--sort", "colour"], "colour"),
    ],
)
def test_wrong_values_are_one_line(tmp_path, monkeypatch, capfd, options, words):
    cache = fixed.fill(tmp_path / "cache")
    code, out, err = fixed.tool(monkeypatch, capfd, "ls", *options, "--cache-dir", cache.root)
    assert (code, out) == (2, "")
    assert words in err
    assert err.count("\n") == 1


@pytest.mark.parametrize("text", ["90s", "1.5min", "2h", "30d", "2 w"])
def test_ages(text):
    from cache_tools.quantities import age

    assert age(None, None, text) == {"90s": 90, "1.5min": 90, "2h": 7200, "30d": 2592000, "2 w": 1209600}[text]
