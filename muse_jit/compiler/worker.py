"""The process that compiles and links one kernel and ends: a fork of the server, which has imported the compiler.

It works in a private folder, answers with a result file, and whatever it prints is the log. The only information it
acts on is the request: family, constants, target, and which modules to take from their source.
"""

import contextlib
import ctypes
import faulthandler
import importlib
import json
import os
import signal
import sys
import time
from importlib.abc import MetaPathFinder
from importlib.machinery import SourceFileLoader
from typing import Any

_PR_SET_PDEATHSIG = 1


def _die_with_parent(expected: int) -> None:
    """Ask the kernel for SIGKILL when the parent ends; end now if it ended before."""
    ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != expected:
        os._exit(1)


def _start_guard(caller: int, folder: str) -> None:
    """Fork a process that sleeps until this one dies, however it dies, and then ends what this one started.

    The death signal above reaches this process only, not a linker or whatever a build function started. Where the
    caller is gone too, its private folder goes with it.
    """
    worker = os.getpid()
    if os.fork():
        return
    os.setpgid(0, 0)
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM})
    ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)
    if os.getppid() == worker:
        signal.sigwait({signal.SIGTERM})
    with contextlib.suppress(OSError):
        os.killpg(worker, signal.SIGKILL)
    deadline = time.monotonic() + 5.0
    while os.path.exists(folder) and time.monotonic() < deadline:  # a caller that lives removes it itself, at once
        if _ended(caller):
            import shutil

            shutil.rmtree(folder, ignore_errors=True)
        time.sleep(0.02)
    os._exit(0)


def _ended(pid: int) -> bool:
    """Whether a process is gone, or waits only for its parent to ask how it ended."""
    try:
        with open(f"/proc/{pid}/stat", "rb") as file:
            return file.read().rpartition(b")")[2].split()[0] in (b"Z", b"X")
    except OSError:
        return True


class _FromSource(MetaPathFinder):
    """Compiles the kernel's modules from their source, whatever byte code lies beside them.

    Byte code is matched to its source by size and whole seconds of its time: two edits in one second, or an image in
    which all times are the same, and the import runs the old code under the new key.
    """

    def __init__(self, modules: frozenset[str]) -> None:
        self.modules = modules

    def find_spec(self, name: str, path: Any, target: Any = None) -> Any:
        if name not in self.modules:
            return None
        others = (f for f in sys.meta_path if f is not self and hasattr(f, "find_spec"))
        spec = next((s for f in others if (s := f.find_spec(name, path, target)) is not None), None)
        if spec is not None and isinstance(spec.loader, SourceFileLoader):
            spec.loader = _Uncached(spec.loader.name, spec.loader.path)
        return spec


class _Uncached(SourceFileLoader):
    def get_code(self, fullname: str) -> Any:
        return self.source_to_code(self.get_data(self.path), self.path)


def _attribute(text: str) -> Any:
    module, _, name = text.partition(":")
    value = importlib.import_module(module)
    for part in name.split("."):
        value = getattr(value, part)
    return value


def _loaded_cuda_major() -> int | None:
    """The CUDA flavour the DSL chose at its import, from the file name of its compiler module."""
    module = sys.modules.get("cutlass._mlir._mlir_libs._cutlass_ir")
    name = os.path.basename(getattr(module, "__file__", None) or "")
    flavour = name.split(".")[1] if name.count(".") > 1 else ""
    return int(flavour[2:]) if flavour.startswith("cu") and flavour[2:].isdigit() else None


def _compile(request: dict[str, Any]) -> list[list[Any]]:
    """Compile, export and link; returns the stages as (name, start, seconds)."""
    started = time.monotonic()
    from muse_jit.compiler.link import link
    from muse_jit.compiler.portable import make_portable
    from muse_jit.errors import SourceChanged
    from muse_jit.key.source import source_of
    from muse_jit.key.target import Target

    target = Target(**request["target"])
    if request["needs_cutlass"]:
        import cutlass  # noqa: F401  (there already, or the reason why not goes to the log)
    loaded = _loaded_cuda_major()
    if loaded is not None and loaded != target.cuda:
        raise RuntimeError(
            f"the DSL loaded its CUDA {loaded} compiler, asked for was CUDA {target.cuda}; it takes the newest "
            f"installed one that the driver supports: uninstall nvidia-cutlass-dsl-libs-cu{loaded}, or ask for "
            f"--cuda {loaded}"
        )
    constants = _attribute(request["constants_class"]).from_dict(request["constants"])
    compiled = _attribute(request["build"])(constants, target)
    if not hasattr(compiled, "export_to_c"):
        raise TypeError(
            f"{request['build']} returned {type(compiled).__name__}; it must return what cute.compile returned, or "
            "an object with export_to_c(path, function_name=)"
        )
    make_portable(compiled, target.host)
    compiled.export_to_c(request["object"], function_name=request["symbol"])
    if source_of(request["build"], also=request["constants_class"]).digest != request["source"]:
        raise SourceChanged("the kernel's source changed while it was compiled; ask again")
    compiled_at = time.monotonic()
    link(request["linker"], request["object"], request["library"], request["runtime_library"])
    return [["compile", started, compiled_at - started], ["link", compiled_at, time.monotonic() - compiled_at]]


def main(folder: str, server: int, imported: tuple[float, float] | None) -> None:
    """Do what `folder`/request.json asks for, write the result, and end; never returns.

    `imported` is when the server imported the compiler, and in how many seconds, where that is still to be reported.
    """
    os.setsid()
    _die_with_parent(server)
    os.chdir(folder)
    log = os.open("log", os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o600)
    os.dup2(log, 1)
    os.dup2(log, 2)
    faulthandler.enable()
    faulthandler.register(signal.SIGUSR1, all_threads=True)
    with open("request.json", encoding="utf-8") as file:
        request = json.load(file)
    _start_guard(request["parent"], folder)
    importlib.invalidate_caches()
    sys.meta_path.insert(0, _FromSource(frozenset(request["modules"])))
    try:
        stages = [["import", *imported, server]] if imported and request["needs_cutlass"] else []
        stages += [[*stage, os.getpid()] for stage in _compile(request)]
        result = {"status": "ok", "stages": stages}
    except Exception as error:
        import traceback

        traceback.print_exc()
        result = {"status": "error", "type": type(error).__name__, "message": str(error)}
    temporary = request["result"] + ".part"
    with open(temporary, "w", encoding="utf-8") as file:
        json.dump(result, file)
    os.rename(temporary, request["result"])
    sys.stdout.flush()
    sys.stderr.flush()
    # The compiler's thread pools and MLIR contexts take long to take down, and the result is on disk.
    os._exit(0)
