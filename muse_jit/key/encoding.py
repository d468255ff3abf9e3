"""Canonical bytes of a plain value: tagged, length-prefixed, and refusing what it does not know.

    None        N
    bool        B  one byte
    int         I  length, decimal text
    float       F  the eight bytes of IEEE 754 binary64, big-endian
    str         S  length, UTF-8
    list/tuple  L  count, items
    dict        M  count, then key and value by sorted key; keys are str

Lengths and counts are eight bytes, big-endian. Every value begins with its tag and says where it ends, so no two
different values share an encoding and no optional part can be mistaken for its neighbour. The value that is encoded
is the document that `entry.json` stores: digest and stored key cannot drift apart.
"""

import functools
import hashlib
import math
import struct
from typing import Any, NewType

from muse_jit.errors import ConstantsError

KeyDigest = NewType("KeyDigest", str)
"""SHA-256 of a key's canonical encoding, as 64 hexadecimal digits: the identity of the inputs."""

ContentDigest = NewType("ContentDigest", str)
"""SHA-256 of an artifact's bytes, as 64 hexadecimal digits: the identity of the output."""


def encode(value: Any) -> bytes:
    """The canonical encoding of `value`.

    Raises:
        ConstantsError: `value` holds something outside the table above, a NaN or infinity, or text without a UTF-8
            form.
    """
    parts: list[bytes] = []
    _append(parts, value)
    return b"".join(parts)


def key_digest(document: Any) -> KeyDigest:
    """SHA-256 over the canonical encoding of a key document."""
    return KeyDigest(hashlib.sha256(encode(document)).hexdigest())


def content_digest(data: bytes | memoryview) -> ContentDigest:
    """SHA-256 over the bytes of an artifact."""
    return ContentDigest(hashlib.sha256(data).hexdigest())


_LENGTHS = tuple(struct.pack(">Q", count) for count in range(256))


def _length(count: int) -> bytes:
    return _LENGTHS[count] if count < 256 else struct.pack(">Q", count)


_STR = {str}


# The same few texts and field names stand in every key of a cache: a listing encodes them a hundred thousand times.
@functools.lru_cache(maxsize=2048)
def _text(value: str) -> bytes:
    try:
        data = value.encode()
    except UnicodeEncodeError as error:
        raise ConstantsError(f"cannot encode {value!r}: it has no UTF-8 form") from error
    return b"S" + _length(len(data)) + data


@functools.lru_cache(maxsize=256)
def _names(names: tuple[str, ...]) -> tuple[bytes, tuple[tuple[str, bytes], ...]]:
    """The head of a mapping, and its keys in order, each with its encoding."""
    return b"M" + _length(len(names)), tuple((name, _text(name)) for name in sorted(names))


@functools.lru_cache(maxsize=256)
def _texts(items: tuple[tuple[str, str], ...]) -> bytes:
    """A mapping of texts."""
    head, names = _names(tuple(name for name, _ in items))
    values = dict(items)
    return head + b"".join(encoded + _text(values[name]) for name, encoded in names)


def _append(parts: list[bytes], value: Any) -> None:
    kind = type(value)
    if kind is str:
        parts.append(_text(value))
    elif kind is dict:
        if not set(map(type, value)) <= _STR:
            name = next(name for name in value if type(name) is not str)
            raise ConstantsError(f"cannot encode the mapping key {name!r}: it must be a str")
        if set(map(type, value.values())) == _STR:  # a part of a toolchain, a target: the same in every key
            parts.append(_texts(tuple(value.items())))
            return
        head, names = _names(tuple(value))
        parts.append(head)
        for name, encoded in names:
            item = value[name]
            if type(item) is str:  # texts and switches here, without a call: most of what a key holds
                parts += (encoded, _text(item))
            elif item is True or item is False:
                parts += (encoded, b"B\x01" if item else b"B\x00")
            else:
                parts.append(encoded)
                _append(parts, item)
    elif value is None:
        parts.append(b"N")
    elif kind is bool:
        parts.append(b"B\x01" if value else b"B\x00")
    elif kind is int:
        text = str(value).encode()
        parts += (b"I", _length(len(text)), text)
    elif kind is float:
        if not math.isfinite(value):
            raise ConstantsError(f"cannot encode {value!r}: only finite numbers can be part of a key")
        parts += (b"F", struct.pack(">d", value))
    elif kind in (list, tuple):
        parts += (b"L", _length(len(value)))
        for item in value:
            _append(parts, item)
    else:
        raise ConstantsError(f"cannot encode {value!r} of type {kind.__name__}: a key holds plain values only")
