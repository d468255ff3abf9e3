"""`entry.json`: what an entry says about itself. Readable with `cat`; the tools need nothing else."""

import dataclasses
import functools
import json
import math
from typing import Any

from muse_jit.key.encoding import ContentDigest, KeyDigest, key_digest
from muse_jit.key.kernel_key import KernelKey

SCHEMA = 1
_FIELDS = {
    "schema": int,
    "digest": str,
    "key": dict,
    "symbol": str,
    "artifact_digest": str,
    "artifact_size": int,
    "compile_seconds": float,
    "link_seconds": float,
    "created": float,
    "created_by": str,
    "resources": list,
}


class BadManifest(ValueError):
    """The text is not an entry of this schema. `schema` is the one it claims, if it claims one."""

    def __init__(self, message: str, schema: object = None) -> None:
        super().__init__(message)
        self.schema = schema


@dataclasses.dataclass(frozen=True)
class Entry:
    """The manifest of one published kernel."""

    digest: KeyDigest
    """Digest of `key`; also the name of the entry's folder."""
    key: dict[str, Any]
    """The whole key document, decoded."""
    symbol: str
    """Name of the exported function."""
    artifact_digest: ContentDigest
    """SHA-256 of kernel.so."""
    artifact_size: int
    """Bytes of kernel.so."""
    compile_seconds: float
    link_seconds: float
    created: float
    """Seconds since the epoch."""
    created_by: str
    """Package and version that wrote it."""
    resources: list[dict[str, Any]]
    """For each GPU kernel of the library: name, registers, shared and local memory in bytes."""
    schema: int = SCHEMA

    @property
    def kernel(self) -> str:
        """Kernel family."""
        return str(self.key["kernel"])

    @property
    def arch(self) -> str:
        """GPU architecture."""
        return str(self.key["target"]["arch"])

    @functools.cached_property
    def key_text(self) -> str:
        """`key` as `KernelKey.text` has it."""
        return json.dumps(self.key, sort_keys=True)

    def to_json(self) -> bytes:
        """The bytes of entry.json."""
        return json.dumps(dataclasses.asdict(self), indent=1).encode() + b"\n"

    @classmethod
    def from_json(cls, data: bytes, asked: KernelKey | None = None) -> "Entry":
        """Read an entry.json. Where the stored key is, to the letter, that of `asked`, so is its digest.

        Raises:
            BadManifest: it is not JSON, of another schema, misses a field or has one of a wrong type, or its digest
                is not that of its key.
        """
        try:
            values = json.loads(data.decode())
        except (ValueError, RecursionError) as error:
            raise BadManifest(f"not JSON: {error}") from None
        if not isinstance(values, dict):
            raise BadManifest("not a JSON object")
        if values.get("schema") != SCHEMA:
            raise BadManifest(f"schema {values.get('schema')!r}, this version reads {SCHEMA}", values.get("schema"))
        for name, kind in _FIELDS.items():
            if type(values.get(name)) is not kind:
                raise BadManifest(f"field {name!r} is missing or not of type {kind.__name__}", SCHEMA)
            if kind is float and not math.isfinite(values[name]):
                raise BadManifest(f"field {name!r} is {values[name]}", SCHEMA)
        if not all(isinstance(kernel, dict) for kernel in values["resources"]):
            raise BadManifest("field 'resources' is not a list of objects", SCHEMA)
        entry = cls(**{name: values[name] for name in _FIELDS})
        try:
            derived = asked.digest if asked and entry.key_text == asked.text else key_digest(entry.key)
            _ = entry.kernel, entry.arch
        except (ValueError, KeyError, TypeError, RecursionError) as error:
            raise BadManifest(f"the stored key is not a key document: {error}", SCHEMA) from None
        for part in ("constants", "target", "toolchain", "options"):
            if not isinstance(entry.key.get(part), dict):
                raise BadManifest(f"the stored key is not a key document: {part!r} is no object", SCHEMA)
        if derived != entry.digest:
            raise BadManifest("the stored digest is not that of the stored key", SCHEMA)
        return entry
