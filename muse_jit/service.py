"""The whole path on one page: constants → key → find → lock → find again → compile → publish → load.

`JitService.get` walks it for one kernel. The second time it is a dictionary look-up and nothing else.
"""

import contextlib
import logging
import os
import threading
import time
import weakref
from collections.abc import Iterator
from typing import TYPE_CHECKING

from muse_jit.constants.base import ConstantSet
from muse_jit.errors import LoadError, MissForbidden, SourceChanged, ToolchainError, UsageError
from muse_jit.kernels.registry import KernelFamily, class_text, family_named
from muse_jit.key.kernel_key import KernelKey
from muse_jit.key.options import check_options
from muse_jit.key.source import Source, source_of
from muse_jit.key.target import Target, check_arch, device_arch, host_arch
from muse_jit.key.toolchain import Toolchain, identify, runtime_library
from muse_jit.settings import Settings
from muse_jit.single_flight import Counters, Request, SingleFlight, Stored, Trouble
from muse_jit.store.layout import Layout, default_root
from muse_jit.store.lookup import Hit, Miss, Reason, find

if TYPE_CHECKING:  # the loader imports tvm_ffi, which `muse-jit plan` and the tools do without
    from muse_jit.loader.kernel import Kernel

logger = logging.getLogger("muse_jit")


class JitService:
    """Kernels for one target, from one cache folder. Safe to use from several threads.

    Raises:
        TargetError: no architecture was given and no device can be asked.
        ToolchainError: no compiler is installed and the cache does not say which one filled it.
    """

    def __init__(self, arch: str | None = None, settings: Settings | None = None) -> None:
        self.settings = settings if settings is not None else Settings.from_environ()
        root, self.root_origin = default_root(self.settings.cache_dir, self.settings.vllm_cache_root)
        self.layout = Layout(root, self.settings.share)
        self.options = check_options(self.settings.compile_options)
        self.toolchain = _identify(self.settings, self.layout)
        arch = device_arch() if arch is None else check_arch(arch)
        self.target = Target(arch, self.toolchain.cuda, self.toolchain.host)
        self.counters = Counters()
        self._memory: dict[ConstantSet, Kernel] = {}
        self._sources: dict[str, Source] = {}
        self.trouble = Trouble(self.settings.strict)
        self._flight = SingleFlight(self.settings, self.layout, self.toolchain, self.counters, self.trouble)
        self._state = threading.Lock()
        self._building: dict[ConstantSet, threading.Lock] = {}
        _services.add(self)

    def get(self, constants: ConstantSet) -> "Kernel":
        """The kernel of a constant set: from memory, from disk, or compiled now, by this process or by another.

        Raises:
            ConstantsError: the constants are not possible on this target.
            UsageError: the family is not registered.
            CompileError: it does not compile; carries the log.
            LinkerMissing, ToolchainError, LoadError: this machine lacks something, named in the message.
            MissForbidden: it is not in the cache and compiling is forbidden.
        """
        kernel = self._memory.get(constants)
        if kernel is not None:
            self.counters.memory_hits += 1
            return kernel
        since = time.monotonic()
        with self._one_thread(constants):
            kernel = self._memory.get(constants)
            if kernel is None:
                kernel = self._memory[constants] = self._from_store(constants, since)
            return kernel

    def obtain(self, constants: ConstantSet, *, force: bool = False, since: float | None = None) -> Stored:
        """Make sure that a kernel is in the cache, without loading it: what a warm-up does on a machine without GPU.

        `force` compiles it also when it is there, and replaces the entry. `since`, by `time.monotonic()`, is when it
        was asked for: somebody else's failure after that is the answer.

        Raises: as `get`, but for LoadError.
        """
        since = time.monotonic() if since is None else since
        return self._obtain(constants, since, force=force)

    def _obtain(
        self, constants: ConstantSet, since: float, *, force: bool = False, rejected: int | None = None
    ) -> Stored:
        """`obtain`; once more, under the new key, where the source was edited meanwhile."""
        try:
            return self._obtain_once(constants, since, force, rejected)
        except SourceChanged:
            self._sources.clear()
            return self._obtain_once(constants, since, force, rejected)

    def _obtain_once(self, constants: ConstantSet, since: float, force: bool, rejected: int | None) -> Stored:
        family, key = self.key_of(constants)
        found = self._find(key, rejected)
        if isinstance(found, Hit) and force:
            found = Miss(Reason.REPLACED, "", found.inode)
        if isinstance(found, Hit):
            self.counters.disk_hits += 1
            return Stored(found, "hit")
        self._may_compile(constants, found)
        request = Request(family, constants, key, self._source(family), since)
        return self._flight.build(request, found, lambda: self._find(key, rejected), force=force)

    def find(self, constants: ConstantSet) -> Hit | Miss:
        """Look a kernel up on disk, verified, without compiling or loading it."""
        return self._find(self.key_of(constants)[1])

    def key_of(self, constants: ConstantSet) -> tuple[KernelFamily, KernelKey]:
        """The family and the key of a constant set on this target.

        Raises:
            UsageError: the family is not registered, or these constants are not of its class.
            ConstantsError: the constants are not possible on this target.
        """
        family = family_named(constants.family)
        if not isinstance(constants, family.constants_class):
            raise UsageError(f"{family.name} takes {family.constants_class.__name__}, not {type(constants).__name__}")
        constants.validate_for(self.target.arch)
        source = self._source(family)
        key = KernelKey(
            family.name,
            constants.as_dict(),
            self.target,
            self.toolchain.parts,
            source.digest,
            family.build,
            self.options,
        )
        return family, key

    def _from_store(self, constants: ConstantSet, since: float) -> "Kernel":
        """Obtain and load; an entry that is intact and cannot be opened is set aside and rebuilt, once."""
        from muse_jit.loader.kernel import load, preload

        runtime = runtime_library(self.target.cuda, self.settings.runtime_lib)
        preload(runtime)  # first: what this machine lacks must not be blamed on an entry
        stored = self.obtain(constants, since=since)
        try:
            return load(stored.hit.entry, stored.hit.artifact, runtime)
        except LoadError as error:
            if stored.status == "compiled":
                raise
            self._reject(stored.hit, str(error))
        stored = self._obtain(constants, since, rejected=stored.hit.inode)
        return load(stored.hit.entry, stored.hit.artifact, runtime)

    def _find(self, key: KernelKey, rejected: int | None = None) -> Hit | Miss:
        """Look a key up, count and report. The entry `rejected` (an inode) cannot be opened, however sound it is."""
        found = Miss(Reason.DISABLED) if self.settings.mode == "off" else find(self.layout, key)
        if isinstance(found, Hit) and rejected is not None and found.inode == rejected:
            found = Miss(Reason.UNLOADABLE, "it cannot be opened and could not be set aside", rejected)
        if isinstance(found, Hit):
            self._touch(found)
        if isinstance(found, Miss):
            with self._state:
                self.counters.misses[found.reason] = self.counters.misses.get(found.reason, 0) + 1
            if found.reason not in (Reason.ABSENT, Reason.DISABLED):
                self.trouble.warn(
                    f"{key.kernel} {key.digest[:12]} in {self.layout.root} is {found.reason}: {found.detail}"
                )
        return found

    def _touch(self, hit: Hit) -> None:
        """Note once a day that an entry is in use."""
        now = time.time()
        if self.settings.mode != "readonly" and hit.last_used is not None and abs(now - hit.last_used) > 86400:
            from muse_jit.store.prune import touch

            touch(self.layout, hit.entry.digest, hit.last_used, now)

    def _reject(self, hit: Hit, why: str) -> None:
        """Set an entry aside whose verified bytes cannot be opened."""
        from muse_jit.store.publish import set_aside

        entry = hit.entry
        with self._state:
            self.counters.misses[Reason.UNLOADABLE] = self.counters.misses.get(Reason.UNLOADABLE, 0) + 1
        self.trouble.warn(f"{entry.kernel} {entry.digest[:12]} in {self.layout.root} is {Reason.UNLOADABLE}: {why}")
        if self.settings.mode != "readonly":
            set_aside(self.layout, entry.digest, Miss(Reason.UNLOADABLE, why, hit.inode))

    def _source(self, family: KernelFamily) -> Source:
        if family.name not in self._sources:
            self._sources[family.name] = source_of(family.build, also=class_text(family.constants_class))
        return self._sources[family.name]

    @contextlib.contextmanager
    def _one_thread(self, constants: ConstantSet) -> Iterator[None]:
        """Threads that want the same kernel queue here; those that want another do not meet."""
        with self._state:
            lock = self._building.setdefault(constants, threading.Lock())
        try:
            with lock:
                yield
        finally:
            with self._state:
                self._building.pop(constants, None)

    def _may_compile(self, constants: ConstantSet, miss: Miss) -> None:
        """Raise where a miss cannot or must not be compiled, with the command that would have filled the cache."""
        missing = f"{constants.family} for {self.target} is not in the cache {self.layout.root} ({miss.reason})"
        remedy = (
            f"fill it with: muse-jit warmup --arch {self.target.arch} --cuda {self.target.cuda} "
            f"--only {constants.family} --cache-dir {self.layout.root} [constants: {constants}]"
        )
        if self.settings.mode == "forbid":
            raise MissForbidden(f"{missing} and compiling is forbidden (MUSE_JIT_MODE); {remedy}")
        if self.toolchain.origin != "installed":
            raise ToolchainError(f"{missing} and no compiler is installed; {remedy}")


def _identify(settings: Settings, layout: Layout) -> Toolchain:
    from muse_jit.store.publish import recorded_toolchains

    toolchain = identify(
        settings.cuda, host_arch(), check=settings.toolchain_check, recorded=recorded_toolchains(layout)
    )
    for file in toolchain.modified:
        logger.warning("installed file differs from what its distribution recorded: %s", file)
    return toolchain


_services: "weakref.WeakSet[JitService]" = weakref.WeakSet()


def _after_fork_in_child() -> None:
    """Locks that threads of the parent held at the fork are nobody's in the child, which begins with free ones."""
    for service in list(_services):
        service._state, service._building = threading.Lock(), {}
        service.trouble.forget_threads()


os.register_at_fork(after_in_child=_after_fork_in_child)
