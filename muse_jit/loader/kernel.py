"""Open verified bytes as a library and look its function up.

The bytes that were verified are the bytes that are opened: they go into an anonymous memory file, and tvm_ffi opens
a link to it. So a file changed after the check changes nothing, a cache mounted noexec works, and no mapped file can
be rewritten under a running kernel. Libraries stay open until the process ends: nothing is unloaded while a CUDA
graph that uses it may be captured or replayed.
"""

import contextlib
import contextvars
import ctypes
import errno
import itertools
import os
import re
import tempfile
import threading
from collections.abc import Iterator
from typing import Any

import tvm_ffi

from muse_jit.errors import LoadError
from muse_jit.store.entry import Entry

_SHORT_OF = tuple(os.strerror(code) for code in (errno.EMFILE, errno.ENFILE, errno.ENOMEM))
"""What the dynamic loader says where this machine, and not the library, is the reason."""

_state = threading.Lock()
_preloaded: dict[str, ctypes.CDLL] = {}


class Kernel:
    """A compiled kernel that can be called. Tensors are anything with DLPack; the stream is the caller's current one.

    A call checks operand dtypes, shapes and alignment as far as they are static, and raises ValueError or TypeError
    from tvm_ffi. The GPU module is loaded by `prepare` or by the first call on a device; one of them must happen before
    a graph capture.
    """

    __slots__ = ("_path", "_runtime", "entry", "function")

    def __init__(self, entry: Entry, function: Any, path: str, runtime: ctypes.CDLL) -> None:
        self.entry = entry
        self.function = function
        self._path, self._runtime = path, runtime

    def __call__(self, *operands: Any) -> Any:
        return self.function(*operands)

    def prepare(self, device: int) -> None:
        """Load the GPU module onto a device, by its CUDA ordinal, without launching; ahead of a graph capture.

        Raises:
            CompileDuringCapture: the current stream is capturing.
            LoadError: no driver or device, one of another architecture, or a kernel that was not compiled here.
        """
        from muse_jit.loader.prepare import prepare

        prepare(self._path, self.entry.symbol, self.entry.arch, self._runtime, device)

    def __repr__(self) -> str:
        return f"<Kernel {self.entry.kernel} {self.entry.digest[:12]} {self.entry.arch}>"


def load(entry: Entry, artifact: bytes, runtime_library: str) -> Kernel:
    """Open an artifact and return its kernel.

    Raises:
        LoadError: the runtime library or the artifact cannot be opened, or the exported function is missing.
    """
    preload(runtime_library)
    name = f"{re.sub(r'[^A-Za-z0-9_]', '_', entry.kernel)[:64]}-{entry.digest[:12]}"
    module, path = _open(artifact, name)
    try:
        function = module[entry.symbol]
    except (AttributeError, ValueError):  # ValueError: a name that cannot be encoded
        raise LoadError(f"{entry.kernel} {entry.digest[:12]} does not export {entry.symbol!a}") from None
    return Kernel(entry, function, path, _preloaded[runtime_library])


def preload(runtime_library: str) -> None:
    """Open libcute_dsl_runtime.so once for the whole process, with its symbols visible to the kernels' libraries.

    Raises:
        LoadError: it cannot be opened, or the runtime of another CUDA major version was opened before.
    """
    if runtime_library in _preloaded:
        return
    with _state:
        if _preloaded and runtime_library not in _preloaded:
            # Both have the same soname: the first one would serve every later library.
            raise LoadError(
                f"this process opened {next(iter(_preloaded))} before and cannot use {runtime_library} beside it"
            )
        try:
            _preloaded[runtime_library] = ctypes.CDLL(runtime_library, mode=ctypes.RTLD_GLOBAL)
        except OSError as error:
            raise LoadError(f"the runtime library {runtime_library} cannot be opened: {error}") from None


def _open(artifact: bytes, name: str) -> tuple[Any, str]:
    """Let tvm_ffi open the bytes, under a path that no library of this process had before; the library and that path.

    The path must be new each time: the dynamic loader takes an equal path for the same library. It should end in
    .so, by which tvm_ffi chooses its reader, and carry the kernel's name, which debuggers and profilers then show.
    """
    descriptor = -1
    try:
        descriptor = os.memfd_create(name, os.MFD_CLOEXEC)
        with open(descriptor, "wb", closefd=False) as file:
            file.write(artifact)
        target = f"/proc/self/fd/{descriptor}"
        with _link(target, f"{name}.so") as path:
            if path is None:
                # No folder where a link could be written (a read-only container, a full disk): open the memory file
                # by its number, and keep the number taken while the library is open, until the process ends.
                opened, descriptor = descriptor, -1
                reader = tvm_ffi.get_global_func("ffi.Module.load_from_file.so")
                return reader(f"/proc/self/fd/{opened}", "so"), f"/proc/self/fd/{opened}"
            return tvm_ffi.load_module(path), path
    except Exception as error:
        # tvm_ffi raises RuntimeError with the dynamic loader's message: a path that is gone by the time it is read.
        text = re.sub(r"\S*muse_jit-\S*?/(\S+\.so)|/proc/self/fd/\d+", name, str(error))
        machine = isinstance(error, OSError) or any(words in text for words in _SHORT_OF)
        raise LoadError(f"{name} cannot be opened: {' '.join(text.split())}", machine=machine) from None
    finally:
        if descriptor >= 0:
            os.close(descriptor)


_shared_folder: contextvars.ContextVar[str | None] = contextvars.ContextVar("shared_folder", default=None)
_numbers = itertools.count()


@contextlib.contextmanager
def several() -> Iterator[None]:
    """One private folder for the links of all loads of the block: making and removing one is a fifth of a load."""
    with contextlib.ExitStack() as stack:
        folder = stack.enter_context(_folder())
        token = _shared_folder.set(folder)
        try:
            yield
        finally:
            _shared_folder.reset(token)


@contextlib.contextmanager
def _folder() -> Iterator[str | None]:
    """A private folder, gone afterwards; None where none can be made."""
    folder = None
    with contextlib.suppress(OSError):
        folder = tempfile.mkdtemp(prefix="muse_jit-")
    try:
        yield folder
    finally:
        if folder is not None:
            with contextlib.suppress(OSError):
                os.rmdir(folder)


@contextlib.contextmanager
def _link(target: str, name: str) -> Iterator[str | None]:
    """A link to `target` in a private folder, gone afterwards; None where none can be made."""
    shared = _shared_folder.get()
    with _folder() if shared is None else contextlib.nullcontext(shared) as folder:
        path = None
        with contextlib.suppress(OSError):
            if folder is not None:
                # In a folder of several loads a path must not come twice either.
                made = os.path.join(folder, name if shared is None else f"{next(_numbers)}-{name}")
                os.symlink(target, made)
                path = made
        try:
            yield path
        finally:
            if path is not None:
                with contextlib.suppress(OSError):
                    os.unlink(path)


def _after_fork_in_child() -> None:
    global _state
    _state = threading.Lock()


os.register_at_fork(after_in_child=_after_fork_in_child)
