"""Results that depend on the bytes of a file and on nothing else, kept from one process to the next.

The syntax tree of a kernel's source and the table of a distribution's files are the same whenever the bytes are. So the
result is looked up by the SHA-256 of the bytes: nothing can be stale, and the worst a lost or damaged memo costs is
the computing. It takes 11 of 17 ms off the keys of a warm start (2-core machine).
"""

import hashlib
import sys
from collections.abc import Callable, Mapping
from typing import Any

VERSION = 1
"""Of what is computed: a change of `source._parsed`, `toolchain._read_identity` or `_read_abi` gets a new number. The
Python version counts as well: the syntax tree is its own, and results should agree, but need not be believed to."""


class Memo:
    """`known` comes from the cache folder; what is computed here collects in `new`, for whoever writes it there."""

    def __init__(self, known: Mapping[str, Any] | None = None) -> None:
        self.known = known if known is not None else {}
        self.new: dict[str, Any] = {}

    def get(self, kind: str, data: bytes, compute: Callable[[], Any]) -> Any:
        """The result for `data`; `kind` says of which computation. Results are what JSON can hold."""
        name = f"{kind} {VERSION} {sys.version_info[0]}.{sys.version_info[1]} {hashlib.sha256(data).hexdigest()}"
        value = self.known.get(name, self.new.get(name))
        if value is None:
            value = self.new[name] = compute()
        return value
