"""Entries for store tests, without a compiler."""

from muse_jit.key.encoding import content_digest
from muse_jit.key.kernel_key import KernelKey
from muse_jit.key.target import Target
from muse_jit.store.entry import Entry

ARTIFACT = bytes(range(256)) * 40


def key(value=1, **changes):
    """A key whose only constant is `value`."""
    parts = {
        "kernel": "toy",
        "constants": {"value": value},
        "target": Target("sm_90a", 13, "x86_64"),
        "toolchain": {"tvm_ffi_abi": "0.1/00"},
        "source": "aa",
        "build": "support.toy:build",
        "options": {},
    }
    return KernelKey(**{**parts, **changes})


def entry(of=None, artifact=ARTIFACT, **changes):
    """The manifest of a key with an artifact."""
    of = of or key()
    values = {
        "digest": of.digest,
        "key": of.document,
        "symbol": of.symbol,
        "artifact_digest": content_digest(artifact),
        "artifact_size": len(artifact),
        "compile_seconds": 0.5,
        "link_seconds": 0.01,
        "created": 1000.0,
        "created_by": "tests",
        "resources": [{"name": "k", "registers": 32, "shared_bytes": 0, "local_bytes": 0, "code_bytes": 512}],
    }
    return Entry(**{**values, **changes})
