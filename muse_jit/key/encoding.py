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


def _append(parts: list[bytes], value: Any) -> None:
    kind = type(value)
    if value is None:
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
    elif kind is str:
        try:
            data = value.encode()
        except UnicodeEncodeError as error:
            raise ConstantsError(f"cannot encode {value!r}: it has no UTF-8 form") from error
        parts += (b"S", _length(len(data)), data)
    elif kind in (list, tuple):
        parts += (b"L", _length(len(value)))
        for item in value:
            _append(parts, item)
    elif kind is dict:
        parts += (b"M", _length(len(value)))
        for key in value:
            if type(key) is not str:
                raise ConstantsError(f"cannot encode the mapping key {key!r}: it must be a str")
        for key in sorted(value):
            _append(parts, key)
            _append(parts, value[key])
    else:
        raise ConstantsError(f"cannot encode {value!r} of type {kind.__name__}: a key holds plain values only")
