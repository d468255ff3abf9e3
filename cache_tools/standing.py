"""Whether an entry can still be found: was it made by the toolchain and the source that are installed here?

An entry that cannot is dead weight on this machine. It need not be on another one that shares the folder, and so
this is told and counted, never acted upon unasked. What cannot be known here (a kernel family that no installed
package registers, a machine without toolchain) counts as usable.
"""

import enum
from typing import Any

from muse_jit.errors import MuseJitError
from muse_jit.key.encoding import key_digest
from muse_jit.key.kernel_key import RECIPE
from muse_jit.key.kernel_key import SCHEMA as KEY_SCHEMA
from muse_jit.key.target import CUDA_MAJORS
from muse_jit.key.toolchain import Toolchain, identify
from muse_jit.store.entry import Entry
from muse_jit.store.layout import Layout
from muse_jit.store.publish import recorded_toolchains


class Standing(enum.StrEnum):
    """What of an entry is no longer what is installed."""

    CURRENT = "current"
    """Toolchain and source are the installed ones."""
    TOOLCHAIN = "stale_toolchain"
    """Another compiler or FFI made it."""
    SOURCE = "stale_source"
    """The kernel's source, or this package's way of compiling, changed since."""
    UNKNOWN = "unknown"
    """Nothing here says."""


DEAD = (Standing.TOOLCHAIN, Standing.SOURCE)


class Standings:
    """Answers for the entries of one cache; each toolchain and each source is looked at once."""

    def __init__(self, layout: Layout) -> None:
        self._layout = layout
        self._digests: dict[str, str] = {}
        self._toolchains: dict[tuple[Any, Any], str | None] = {}
        self._sources: dict[str, tuple[str, str] | None] = {}
        self._recorded: list[dict[str, Any]] | None = None
        self.why_unknown = ""
        """Why no toolchain is known here, if so."""

    def of(self, entry: Entry) -> Standing:
        """The standing of one entry."""
        target = entry.key["target"]
        installed = self.installed(target.get("cuda"), target.get("host"))
        if installed is not None and self.toolchain_digest(entry) != installed:
            return Standing.TOOLCHAIN
        if entry.key.get("schema") != KEY_SCHEMA or entry.key.get("recipe") != RECIPE:
            return Standing.SOURCE
        source = self._source(entry.kernel)
        if source is not None and source != (entry.key.get("build"), entry.key.get("source")):
            return Standing.SOURCE
        return Standing.UNKNOWN if installed is None or source is None else Standing.CURRENT

    def toolchain_digest(self, entry: Entry) -> str:
        """Digest of an entry's toolchain. Caches have few, entries are many: equal ones are digested once."""
        plain = repr(entry.key["toolchain"])
        if plain not in self._digests:
            self._digests[plain] = key_digest(entry.key["toolchain"])
        return self._digests[plain]

    def installed(self, cuda: Any, host: Any) -> str | None:
        """Digest of the toolchain that a look-up here would use; "" for one that is not installed beside others that
        are; None where nothing says."""
        wanted = (cuda, host)
        if wanted not in self._toolchains:
            try:
                self._toolchains[wanted] = self.identify(cuda, host).digest
            except MuseJitError as error:
                self._toolchains[wanted] = None if not self._any_installed() else ""
                self.why_unknown = str(error)
        return self._toolchains[wanted]

    def identify(self, cuda: Any, host: Any) -> Toolchain:
        """The toolchain of a target, as a service would identify it. Raises `ToolchainError`."""
        if self._recorded is None:
            self._recorded = recorded_toolchains(self._layout)
        return identify(cuda if cuda in CUDA_MAJORS else None, str(host), recorded=self._recorded)

    def _any_installed(self) -> bool:
        from muse_jit.key.toolchain import installed_cuda_majors

        return bool(installed_cuda_majors())

    def _source(self, kernel: str) -> tuple[str, str] | None:
        """Build function and source digest of a family as it is installed; None where it is not."""
        if kernel not in self._sources:
            from muse_jit.kernels.registry import class_text, family_named
            from muse_jit.key.source import source_of

            try:
                family = family_named(kernel)
                source = source_of(family.build, also=class_text(family.constants_class))
                self._sources[kernel] = (family.build, source.digest)
            except (MuseJitError, OSError):
                self._sources[kernel] = None
        return self._sources[kernel]
