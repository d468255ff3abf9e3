"""Start a compile worker, wait for it, and turn its end into a result or a `CompileError`.

A plain child process: multiprocessing would refuse daemonic parents and import the caller's main module. The worker
gets a list of variables it may see and nothing else; `CUTE_DSL_*` variables reach it only as checked compile options,
and no GPU is visible to it.
"""

import contextlib
import dataclasses
import json
import os
import re
import signal
import subprocess
import sys
from collections.abc import Mapping
from typing import Any

from muse_jit.errors import CompileError, SourceChanged

_WORKER = os.path.join(os.path.dirname(os.path.abspath(__file__)), "worker.py")
_PASSED_ON = ("PATH", "HOME", "TMPDIR", "LANG", "LC_ALL", "LC_CTYPE", "LD_LIBRARY_PATH")
_LOG_BYTES = 1 << 20


@dataclasses.dataclass(frozen=True)
class WorkerResult:
    """What a worker that succeeded leaves: a library, its times, and what it printed."""

    library_path: str
    import_seconds: float
    compile_seconds: float
    link_seconds: float
    log: str


def run_worker(request: dict[str, Any], folder: str, options: Mapping[str, str], timeout: float) -> WorkerResult:
    """Compile one request in a new process, in the private `folder`, within `timeout` seconds.

    `request` holds build, constants_class, constants, target, symbol, source, modules, needs_torch, needs_cutlass,
    linker and runtime_library; `options` are the DSL's variables with their prefix.

    Raises:
        CompileError: with the first compiler error and the whole log, or how the worker ended.
    """
    names = ("request.json", "result.json", "kernel.o", "library", "log")
    paths = {name: os.path.join(folder, name) for name in names}
    document = {
        **request,
        "parent": os.getpid(),
        "sys_path": [os.path.abspath(p or ".") for p in sys.path],
        "object": paths["kernel.o"],
        "library": paths["library"],
        "result": paths["result.json"],
    }
    with open(paths["request.json"], "w", encoding="utf-8") as file:
        json.dump(document, file)
    with open(paths["log"], "wb") as log:
        process = subprocess.Popen(
            [sys.executable, "-I", _WORKER, paths["request.json"]],
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
            cwd=folder,
            env=_environment(folder, options),
            start_new_session=True,  # Ctrl-C at the terminal reaches the parent, which ends the worker in order
        )
        try:
            code = process.wait(timeout)
        except subprocess.TimeoutExpired:
            raise CompileError(
                f"did not finish within {timeout:g} s (MUSE_JIT_COMPILE_TIMEOUT)", _read_log(paths["log"])
            ) from None
        finally:
            _end(process)
    text = _read_log(paths["log"])
    result = _read_result(paths["result.json"])
    if result is None:
        raise CompileError(f"the compile worker ended without a result ({_describe_exit(code)})", text)
    if result["status"] != "ok":
        if result["type"] == CompileError.__name__:  # the linker's, already in one line
            raise CompileError(result["message"], text)
        if result["type"] == SourceChanged.__name__:
            raise SourceChanged(result["message"], text)
        raise CompileError(first_error(text, f"{result['type']}: {result['message']}"), text)
    seconds = (result["import_seconds"], result["compile_seconds"], result["link_seconds"])
    return WorkerResult(paths["library"], *seconds, text)


def first_error(log: str, fallback: str) -> str:
    """The first compiler error of a log in one line; without one, the first telling line of `fallback`."""
    for line in log.splitlines():
        if re.search(r"\berror: \S", line, re.IGNORECASE):
            return line.strip()
    lines = [line.strip() for line in fallback.splitlines() if re.search(r"\w{2}", line)]
    return " ".join(lines[:2]) if lines else "no message"


def _environment(folder: str, options: Mapping[str, str]) -> dict[str, str]:
    passed = {name: os.environ[name] for name in _PASSED_ON if name in os.environ}
    blind = {"CUDA_VISIBLE_DEVICES": "", "CUTE_DSL_CACHE_DIR": folder, "CUTE_DSL_DISABLE_FILE_CACHING": "1"}
    return {**passed, **blind, **options}


def _end(process: subprocess.Popen[bytes]) -> None:
    """End the worker and whatever it started, and reap it; it may have ended already."""
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()


def _read_log(path: str) -> str:
    with open(path, "rb") as file:
        return file.read(_LOG_BYTES).decode("utf-8", "replace")


def _read_result(path: str) -> dict[str, Any] | None:
    try:
        with open(path, encoding="utf-8") as file:
            result = json.load(file)
    except (OSError, ValueError):
        return None
    return result if isinstance(result, dict) else None


def _describe_exit(code: int) -> str:
    if code >= 0:
        return f"exit code {code}"
    name = signal.Signals(-code).name
    hint = ", as the system does when memory runs out" if name == "SIGKILL" else ""
    return f"killed by {name}{hint}"
