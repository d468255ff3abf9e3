"""The key of one kernel: everything that decides its bytes, as one document with one digest."""

import dataclasses
import functools
import json
from typing import Any

from muse_jit.key.encoding import KeyDigest, key_digest
from muse_jit.key.target import Target

SCHEMA = 1
"""Version of the key document. A change of its meaning gets a new number, and so a new digest for everything."""

RECIPE = 2
"""Version of how this package compiles and links (worker, flags of the link, name of the symbol), none of which is
in a kernel's source. A change that changes the bytes gets a new number."""


STATE_SYMBOL = "muse_jit_cuda_state"
"""Name of the global that holds a library's GPU module: exported where it is compiled, read where it is prepared."""


def symbol_of(digest: KeyDigest) -> str:
    """Name of the exported function in the library of a key: unique per key, so that a backtrace tells them apart."""
    return f"muse_jit_{digest[:16]}"


@dataclasses.dataclass(frozen=True)
class KernelKey:
    """All inputs of a compile. Not in it: paths, times, Python and torch version, environment, rank, host, user."""

    kernel: str
    """Kernel family, as registered."""
    constants: dict[str, Any]
    """Field name to plain value."""
    target: Target
    toolchain: dict[str, Any]
    """`Toolchain.parts`."""
    source: str
    """`Source.digest`."""
    build: str
    """ "module:function": two functions of one module share a source digest and differ here."""
    options: dict[str, str]
    """Checked compile options."""

    @functools.cached_property
    def document(self) -> dict[str, Any]:
        """The plain form that is digested, stored in `entry.json` and compared on a hit."""
        return {
            "schema": SCHEMA,
            "recipe": RECIPE,
            "kernel": self.kernel,
            "constants": self.constants,
            "target": self.target.as_dict(),
            "toolchain": self.toolchain,
            "source": self.source,
            "build": self.build,
            "options": self.options,
        }

    @functools.cached_property
    def digest(self) -> KeyDigest:
        """SHA-256 over the canonical encoding of `document`."""
        return key_digest(self.document)

    @functools.cached_property
    def text(self) -> str:
        """`document` as JSON, in which 1, true and 1.0 differ: the quick way to see that two documents are one."""
        return json.dumps(self.document, sort_keys=True)

    @property
    def symbol(self) -> str:
        """Name of the exported function in the library."""
        return symbol_of(self.digest)
