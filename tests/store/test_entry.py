import json

import pytest
from support.entries import entry, key

from muse_jit.store.entry import BadManifest, Entry


def test_round_trip():
    original = entry(key(1.5))
    assert Entry.from_json(original.to_json()) == original
    assert (original.kernel, original.arch) == ("toy", "sm_90a")


def test_it_can_be_read_with_cat():
    text = entry(key(8192)).to_json().decode()
    assert '"value": 8192' in text
    assert text.count("\n") > 10


def test_every_truncation_is_a_bad_manifest():
    data = entry().to_json()
    for length in range(len(data) - 2):
        with pytest.raises(BadManifest):
            Entry.from_json(data[:length])


WRONG = {
    "digest": (None, "x", 3),
    "key": (None, [], {"a": 1}, {"kernel": "toy", "target": 3}),
    "symbol": (None, True, 3),
    "artifact_digest": (None, [], 3),
    "artifact_size": (None, True, 3.0, "3"),
    "created": (None, 3, "now"),
    "resources": (None, {}, "none"),
}


@pytest.mark.parametrize(("field", "value"), [(f, v) for f, values in WRONG.items() for v in values])
def test_a_field_of_a_wrong_type_or_content_is_a_bad_manifest(field, value):
    document = json.loads(entry().to_json())
    document[field] = value
    with pytest.raises(BadManifest):
        Entry.from_json(json.dumps(document).encode())


def test_a_key_that_was_edited_no_longer_has_its_digest():
    data = entry(key(7)).to_json().replace(b'"value": 7', b'"value": 7.0')
    with pytest.raises(BadManifest, match="digest is not that of the stored key"):
        Entry.from_json(data)


@pytest.mark.parametrize("schema", [0, 2, "1", None, 1.0, True])
def test_another_schema_says_so(schema):
    document = json.loads(entry().to_json())
    document["schema"] = schema
    with pytest.raises(BadManifest, match="schema"):
        Entry.from_json(json.dumps(document).encode())


@pytest.mark.parametrize("data", [b"", b"null", b"[1]", b"\xff\xfe", b"[" * 100000, b'{"schema": 1e999}'])
def test_what_is_no_manifest_at_all(data):
    with pytest.raises(BadManifest):
        Entry.from_json(data)
