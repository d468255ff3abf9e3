"""The whole path on one page: constants → key → find → lock → find again → compile → publish → load.

`JitService.get` walks it for one kernel. The second time it is a dictionary look-up and nothing else.
"""

import contextlib
import dataclasses
import logging
import threading
import time
from collections.abc import Iterator
from typing import TYPE_CHECKING

from muse_jit import __version__
from muse_jit.constants.base import ConstantSet
from muse_jit.errors import CacheUnusable, CompileError, LoadError, MissForbidden, ToolchainError, UsageError
from muse_jit.kernels.registry import KernelFamily, family_named
from muse_jit.key.encoding import content_digest
from muse_jit.key.kernel_key import KernelKey
from muse_jit.key.options import check_options
from muse_jit.key.source import Source, source_of
from muse_jit.key.target import Target, check_arch, device_arch, host_arch
from muse_jit.key.toolchain import Toolchain, identify, runtime_library
from muse_jit.settings import Settings
from muse_jit.store.entry import Entry
from muse_jit.store.layout import Layout, default_root
from muse_jit.store.lookup import TO_SET_ASIDE, Hit, Miss, Reason, find

if TYPE_CHECKING:  # the loader imports tvm_ffi, which `muse-jit plan` and the tools do without
    from muse_jit.loader.kernel import Kernel

logger = logging.getLogger("muse_jit")


@dataclasses.dataclass
class Counters:
    """What a service did: one count for each way a request was answered, and what went wrong beside it."""

    memory_hits: int = 0
    disk_hits: int = 0
    compiled: int = 0
    failed: int = 0
    waited: int = 0
    """Requests that waited for another process to compile the same key."""
    not_stored: int = 0
    """Kernels that were compiled and could not be written to the cache."""
    misses: dict[str, int] = dataclasses.field(default_factory=dict)
    """Reason of a miss to how often."""


@dataclasses.dataclass(frozen=True)
class Stored:
    """The answer to one request before loading: the artifact, and how it was come by."""

    hit: Hit
    status: str
    """ "hit" or "compiled"."""
    not_stored: str = ""
    """Why a compiled kernel is not in the cache; empty when it is."""


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
        self._warned: set[str] = set()
        self._state = threading.Lock()
        self._building: dict[ConstantSet, threading.Lock] = {}

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
        with self._one_thread(constants):
            kernel = self._memory.get(constants)
            if kernel is None:
                kernel = self._memory[constants] = self._from_store(constants)
            return kernel

    def obtain(self, constants: ConstantSet, *, force: bool = False) -> Stored:
        """Make sure that a kernel is in the cache, without loading it: what a warm-up does on a machine without GPU.

        `force` compiles it also when it is there, and replaces the entry.

        Raises: as `get`, but for LoadError.
        """
        family, key = self.key_of(constants)
        found = self._find(key)
        if isinstance(found, Hit) and force:
            found = Miss(Reason.REPLACED, "", found.inode)
        if isinstance(found, Hit):
            self.counters.disk_hits += 1
            return Stored(found, "hit")
        self._may_compile(constants, found)
        with self._hold(key, constants) as locked:
            again = self._find(key) if locked and not force else found
            if isinstance(again, Hit):
                self.counters.disk_hits += 1
                return Stored(again, "hit")
            built = self._compile(family, constants, key)
            return self._publish(key, built, again)

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
        source = self._source(family.build)
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

    def _from_store(self, constants: ConstantSet) -> "Kernel":
        """Obtain and load; an entry that is intact and cannot be opened is set aside and rebuilt, once."""
        from muse_jit.loader.kernel import load, preload

        runtime = runtime_library(self.target.cuda, self.settings.runtime_lib)
        preload(runtime)  # first: what this machine lacks must not be blamed on an entry
        stored = self.obtain(constants)
        try:
            return load(stored.hit.entry, stored.hit.artifact, runtime)
        except LoadError as error:
            if stored.status == "compiled":
                raise
            self._reject(stored.hit, str(error))
        stored = self.obtain(constants)
        return load(stored.hit.entry, stored.hit.artifact, runtime)

    def _find(self, key: KernelKey) -> Hit | Miss:
        found = Miss(Reason.DISABLED) if self.settings.mode == "off" else find(self.layout, key)
        if isinstance(found, Miss):
            with self._state:
                self.counters.misses[found.reason] = self.counters.misses.get(found.reason, 0) + 1
            if found.reason not in (Reason.ABSENT, Reason.DISABLED):
                self._warn(f"{key.kernel} {key.digest[:12]} in {self.layout.root} is {found.reason}: {found.detail}")
        return found

    @contextlib.contextmanager
    def _hold(self, key: KernelKey, constants: ConstantSet) -> Iterator[bool]:
        """Hold the key's lock; yields False where there can be no lock, and the kernel is compiled without one."""
        if self.settings.mode in ("off", "readonly"):
            yield False
            return
        from muse_jit.store.lock import LockTimeout, hold

        def waiting(holder: str) -> None:
            self.counters.waited += 1
            logger.info("waiting for %s: compiled by %s", key.kernel, holder)

        with contextlib.ExitStack() as stack:
            try:
                self.layout.create()
                what = f"compiling {key.kernel} for {self.target.arch}"
                stack.enter_context(hold(self.layout, key.digest, what, self.settings.stall_limit, waiting))
                locked = True
            except (OSError, CacheUnusable, LockTimeout) as error:
                self._warn(f"no lock in the cache ({error}); compiling without it")
                locked = False
            yield locked

    def _compile(self, family: KernelFamily, constants: ConstantSet, key: KernelKey) -> Hit:
        from muse_jit.compiler.build import build
        from muse_jit.store.publish import keep_log

        started = time.perf_counter()
        logger.debug("compiling %s for %s: %s", key.kernel, self.target, constants)
        try:
            built = build(
                family,
                constants,
                key,
                runtime_library=runtime_library(self.target.cuda, self.settings.runtime_lib),
                imports=self._source(family.build).outside,
                timeout=self.settings.compile_timeout,
                cc=self.settings.cc,
            )
        except CompileError as error:
            self.counters.failed += 1
            if self.settings.mode == "auto":
                with contextlib.suppress(CacheUnusable):
                    error.log_path = keep_log(self.layout, key.digest, error.log) or ""
            where = f"; full log: {error.log_path}" if error.log_path else ""
            raise CompileError(f"{error}{where}", error.log, error.log_path) from None
        self.counters.compiled += 1
        logger.debug("compiled %s in %.2f s", key.kernel, time.perf_counter() - started)
        entry = Entry(
            digest=key.digest,
            key=key.document,
            symbol=key.symbol,
            artifact_digest=content_digest(built.artifact),
            artifact_size=len(built.artifact),
            compile_seconds=round(built.compile_seconds, 4),
            link_seconds=round(built.link_seconds, 4),
            created=time.time(),
            created_by=f"muse_jit {__version__}",
            resources=built.resources,
        )
        return Hit(entry, built.artifact)

    def _publish(self, key: KernelKey, built: Hit, miss: Miss) -> Stored:
        """Store what was built. Trouble of the cache costs a warning; the kernel is used from memory."""
        if self.settings.mode in ("off", "readonly"):
            return Stored(built, "compiled", f"mode {self.settings.mode} writes nothing")
        from muse_jit.store.publish import publish, record_toolchain, set_aside

        try:
            if miss.reason in TO_SET_ASIDE:
                set_aside(self.layout, key.digest, miss)
            publish(self.layout, built.entry, built.artifact)
            record_toolchain(self.layout, self.toolchain, built.entry.created)
        except (OSError, CacheUnusable) as error:
            self.counters.not_stored += 1
            self._warn(f"the cache cannot be written, kernels are used from memory: {error}")
            return Stored(built, "compiled", str(error))
        return Stored(built, "compiled")

    def _reject(self, hit: Hit, why: str) -> None:
        """Set an entry aside whose verified bytes cannot be opened."""
        from muse_jit.store.publish import set_aside

        entry = hit.entry
        with self._state:
            self.counters.misses[Reason.UNLOADABLE] = self.counters.misses.get(Reason.UNLOADABLE, 0) + 1
        self._warn(f"{entry.kernel} {entry.digest[:12]} in {self.layout.root} is {Reason.UNLOADABLE}: {why}")
        if self.settings.mode != "readonly":
            set_aside(self.layout, entry.digest, Miss(Reason.UNLOADABLE, why, hit.inode))

    def _source(self, build: str) -> Source:
        if build not in self._sources:
            self._sources[build] = source_of(build)
        return self._sources[build]

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

    def _warn(self, message: str) -> None:
        """Warn once per message."""
        with self._state:
            known = message in self._warned
            self._warned.add(message)
        if not known:
            logger.warning("%s", message)


def _identify(settings: Settings, layout: Layout) -> Toolchain:
    from muse_jit.store.publish import recorded_toolchains

    toolchain = identify(
        settings.cuda, host_arch(), check=settings.toolchain_check, recorded=recorded_toolchains(layout)
    )
    for file in toolchain.modified:
        logger.warning("installed file differs from what its distribution recorded: %s", file)
    return toolchain
