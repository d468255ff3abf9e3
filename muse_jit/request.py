"""One request for a kernel, and its answer before loading."""

import dataclasses

from muse_jit.constants.base import ConstantSet
from muse_jit.kernels.registry import KernelFamily
from muse_jit.key.kernel_key import KernelKey
from muse_jit.key.source import Source
from muse_jit.spans import Spans
from muse_jit.store.lookup import Hit


@dataclasses.dataclass(frozen=True)
class Stored:
    """The answer to one request before loading: the artifact, and how it was come by."""

    hit: Hit
    status: str
    """ "hit" or "compiled"."""
    not_stored: str = ""
    """Why a compiled kernel is not in the cache; empty when it is."""


@dataclasses.dataclass(frozen=True)
class Request:
    """One kernel that is wanted and was not found."""

    family: KernelFamily
    constants: ConstantSet
    key: KernelKey
    source: Source
    """What the key's source digest was taken from."""
    since: float
    """When it was asked for, by `time.monotonic()`: a failure after that is an answer to it."""
    spans: Spans
    """Where its time is written down."""

    @property
    def what(self) -> str:
        """What the holder of its lock does, for those who wait."""
        return f"compiling {self.key.kernel} for {self.key.target.arch}"
