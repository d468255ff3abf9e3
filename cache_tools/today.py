"""The key that a look-up of this moment would ask for: with the toolchain and the source that are installed now.

The same steps as `JitService.key_of`, without what a service needs beside it; a test compares the two.
"""

from typing import Any

from cache_tools.standing import Standings
from muse_jit.constants.base import ConstantSet
from muse_jit.errors import ConstantsError, ToolchainError, UsageError
from muse_jit.kernels.registry import KernelFamily, class_text, family_named
from muse_jit.key.kernel_key import KernelKey
from muse_jit.key.options import check_options
from muse_jit.key.source import Source, source_of
from muse_jit.key.target import Target, host_arch
from muse_jit.settings import Settings
from muse_jit.store.entry import Entry


class Today:
    """Keys of this moment for one cache; each toolchain and each source is looked at once."""

    def __init__(self, settings: Settings, standings: Standings) -> None:
        self._settings = settings
        self._standings = standings
        self._sources: dict[str, Source] = {}

    def key(self, constants: ConstantSet, arch: str) -> KernelKey:
        """The key of a constant set for an architecture, with this environment's compile options.

        Raises:
            ToolchainError: nothing identifies a toolchain.
            UsageError, ConstantsError: the family is not registered, or the constants are not possible there.
        """
        constants.validate_for(arch)
        toolchain = self._standings.identify(self._settings.cuda, host_arch())
        target = Target(arch, toolchain.cuda, toolchain.host)
        family = family_named(constants.family)
        return self._key(family, constants, target, toolchain.parts, check_options(self._settings.compile_options))

    def key_of_entry(self, entry: Entry) -> tuple[KernelFamily, ConstantSet, KernelKey]:
        """The key that the constants, target and options of an entry have now; and its family and constants.

        Raises: as `key`; `UsageError` also for constants or a target that make no sense.
        """
        family = family_named(entry.kernel)
        try:
            constants = family.constants_class.from_dict(entry.key["constants"])
            target = Target(**entry.key["target"])
        except (ConstantsError, TypeError) as error:
            raise UsageError(f"its constants or target are not those of this version: {error}") from None
        toolchain = self._standings.identify(target.cuda, target.host)
        options: dict[str, str] = check_options(tuple(entry.key["options"].items()))
        return family, constants, self._key(family, constants, target, toolchain.parts, options)

    def source(self, family: KernelFamily) -> Source:
        """What the source digest of a family was taken from. Raises `UsageError`."""
        if family.name not in self._sources:
            try:
                self._sources[family.name] = source_of(family.build, also=class_text(family.constants_class))
            except OSError as error:
                raise UsageError(f"the source of {family.build} cannot be read: {error}") from None
        return self._sources[family.name]

    def installed(self) -> bool:
        """Whether a compiler is installed here, not only recorded by the cache."""
        try:
            return self._standings.identify(self._settings.cuda, host_arch()).origin == "installed"
        except ToolchainError:
            return False

    def _key(
        self, family: KernelFamily, constants: ConstantSet, target: Target, parts: dict[str, Any], options: Any
    ) -> KernelKey:
        source = self.source(family).digest
        return KernelKey(family.name, constants.as_dict(), target, parts, source, family.build, options)
