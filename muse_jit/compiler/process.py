"""Have a worker do one request, and turn its end into a result or a `CompileError`.

The worker is no child of multiprocessing, which would refuse daemonic parents and import the caller's main module. It
gets a list of variables it may see and nothing else; `CUTE_DSL_*` variables reach it only as checked compile options,
and no GPU is visible to it.
"""

import dataclasses
import json
import os
import re
import signal
from collections.abc import Mapping
from typing import Any

from muse_jit.compiler.forkserver import run_in_fork
from muse_jit.errors import CompileError, SourceChanged
from muse_jit.spans import Span

_PASSED_ON = ("PATH", "HOME", "TMPDIR", "LANG", "LC_ALL", "LC_CTYPE", "LD_LIBRARY_PATH")
_LOG_BYTES = 1 << 20


@dataclasses.dataclass(frozen=True)
class WorkerResult:
    """What a worker that succeeded leaves: a library, the spans of its stages, and what it printed."""

    library_path: str
    spans: tuple[Span, ...]
    log: str


def run_worker(request: dict[str, Any], folder: str, options: Mapping[str, str], timeout: float) -> WorkerResult:
    """Compile one request in a worker, in the private `folder`, within `timeout` seconds.

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
        "object": paths["kernel.o"],
        "library": paths["library"],
        "result": paths["result.json"],
    }
    with open(paths["request.json"], "w", encoding="utf-8") as file:
        json.dump(document, file)
    needs = {name: request[name] for name in ("needs_torch", "needs_cutlass")}
    environment = _environment(options, request["target"]["arch"])
    status = run_in_fork(folder, environment, **needs, timeout=timeout)
    text = _read_log(paths["log"])
    if status is None:
        raise CompileError(f"did not finish within {timeout:g} s (MUSE_JIT_COMPILE_TIMEOUT)", text)
    result = _read_result(paths["result.json"])
    if result is None:
        raise CompileError(f"the compile worker ended without a result ({_describe_exit(status)})", text)
    if result["status"] != "ok":
        if result["type"] == CompileError.__name__:  # the linker's, already in one line
            raise CompileError(result["message"], text)
        if result["type"] == SourceChanged.__name__:
            raise SourceChanged(result["message"], text)
        raise CompileError(first_error(text, f"{result['type']}: {result['message']}"), text)
    spans = tuple(Span(stage, start, seconds, pid, pid) for stage, start, seconds, pid in result["stages"])
    return WorkerResult(paths["library"], spans, text)


def first_error(log: str, fallback: str) -> str:
    """The first compiler error of a log in one line; without one, the first telling line of `fallback`."""
    for line in log.splitlines():
        if re.search(r"\berror: \S", line, re.IGNORECASE):
            return line.strip()
    lines = [line.strip() for line in fallback.splitlines() if re.search(r"\w{2}", line)]
    return " ".join(lines[:2]) if lines else "no message"


def _environment(options: Mapping[str, str], arch: str) -> dict[str, str]:
    passed = {name: os.environ[name] for name in _PASSED_ON if name in os.environ}
    fixed = {
        "CUDA_VISIBLE_DEVICES": "",
        # Without it the DSL asks the driver, in each worker; where there is one, that never comes back in a fork.
        "CUTE_DSL_ARCH": arch,
        "CUTE_DSL_DISABLE_FILE_CACHING": "1",
        "CUTE_DSL_CACHE_DIR": "/proc/self",  # the DSL makes this folder at its import; here nobody can write into it
        "OPENBLAS_NUM_THREADS": "1",  # numpy's threads would be in the server when it forks
    }
    return {**passed, **fixed, **options}


def _read_log(path: str) -> str:
    try:
        with open(path, "rb") as file:
            return file.read(_LOG_BYTES).decode("utf-8", "replace")
    except OSError:  # the worker did not come so far
        return ""


def _read_result(path: str) -> dict[str, Any] | None:
    try:
        with open(path, encoding="utf-8") as file:
            result = json.load(file)
    except (OSError, ValueError):
        return None
    return result if isinstance(result, dict) else None


def _describe_exit(status: int) -> str:
    code = os.waitstatus_to_exitcode(status)
    if code >= 0:
        return f"exit code {code}"
    try:
        name = signal.Signals(-code).name
    except ValueError:  # a real-time signal
        name = f"signal {-code}"
    hint = ", as the system does when memory runs out" if name == "SIGKILL" else ""
    return f"killed by {name}{hint}"
