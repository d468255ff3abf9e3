"""The exception classes of muse_jit, and who may raise each.

    MuseJitError                base; every message is one line a person can act on
      ConstantsError            constants/: a constant set that cannot be (also a ValueError)
      UsageError                cli, plan, settings: wrong input from a person (exit code 2)
        TargetError             key/target: no architecture named and none to ask
      ToolchainError            key/toolchain: nothing to identify the compiler by, or a wrong one loaded
      CompileError              compiler/: a kernel did not compile; carries the log
        CompileEnded            compiler/: this process ended its compiles (interruption, `serving`)
        SourceChanged           compiler/: the source was edited meanwhile; the service asks again once
      LinkerMissing             compiler/link: no linker on this machine (exit code 3)
      VerifyMismatch            service: a recompiled kernel is not what is stored (mode verify)
      LoadError                 loader/: a verified library cannot be opened or lacks its symbol
      MissForbidden             service: a miss while compiling is forbidden, by the mode or once the engine serves
      RankMissing               ops/: a kernel waited in vain for another rank's part of an all-reduce
      CompileDuringCapture      service: anything but a memory hit during a CUDA graph capture
      CacheUnusable             store/: the cache folder cannot be used for what was asked (exit code 3)

The store's look-up raises none of these: a damaged, foreign or unreadable entry is a `Miss` with its reason.
"""


class MuseJitError(Exception):
    """Base of all errors of this package."""


class ConstantsError(MuseJitError, ValueError):
    """A constant set that cannot be: names the field, the value and what is allowed."""


class UsageError(MuseJitError):
    """Wrong input from a person: says what is allowed."""


class TargetError(UsageError):
    """No target architecture: neither named nor to be asked from a device."""


class ToolchainError(MuseJitError):
    """The compiler cannot be identified, or another than the identified one was loaded."""


class CompileError(MuseJitError):
    """A kernel did not compile. `log` is the worker's complete standard error; `log_path` where it was kept."""

    def __init__(self, message: str, log: str = "", log_path: str = "") -> None:
        super().__init__(message)
        self.log = log
        self.log_path = log_path


class CompileEnded(CompileError):
    """This process ended its compiles. That says nothing of the kernel, and is told to nobody who waits for it."""


class SourceChanged(CompileError):
    """The kernel's source was edited between the look-up and the compile; asking again takes the new one."""


class LinkerMissing(MuseJitError):
    """There is no linker on this machine, so nothing can be published."""


class VerifyMismatch(MuseJitError):
    """A kernel was compiled again and its bytes are not those in the cache."""


class LoadError(MuseJitError):
    """A verified library could not be opened, or its entry symbol is missing.

    `machine` says that this machine lacks something (descriptors, memory), which is not to be blamed on the entry.
    """

    def __init__(self, message: str, *, machine: bool = False) -> None:
        super().__init__(message)
        self.machine = machine


class MissForbidden(MuseJitError):
    """A kernel is not in the cache and compiling is forbidden."""


class RankMissing(MuseJitError):
    """A rank's part of an all-reduce did not come in time; names the rank and the row."""


class CompileDuringCapture(MuseJitError):
    """A kernel was asked for during a CUDA graph capture and is not in memory."""


class CacheUnusable(MuseJitError):
    """The cache folder cannot be used for what was asked."""
