"""Object file to shared library, in the worker process.

`tvm_ffi` opens libraries only, so a linker is needed once, where kernels compile.

The only library the result needs is libcute_dsl_runtime.so, without a path: the loader opens it first, and a moved
environment keeps its cache. tvm_ffi's symbols stay open; the process that loads a kernel has tvm_ffi.
"""

import importlib.util
import shlex
import shutil
import subprocess
import sys

from muse_jit.errors import CompileError, LinkerMissing

_TIMEOUT = 120.0


def find_linker(cc: str | None) -> list[str]:
    """The command of the compiler driver to link with: $CC, cc, gcc, clang, or ziglang's, in that order.

    Raises:
        LinkerMissing: there is none, with what to install.
    """
    for candidate in ([cc] if cc else []) + ["cc", "gcc", "clang"]:
        command = shlex.split(candidate)
        if command and shutil.which(command[0]):
            return command
    if importlib.util.find_spec("ziglang") is not None:
        return [sys.executable, "-m", "ziglang", "cc"]
    raise LinkerMissing(
        "no linker: none of $CC, cc, gcc, clang is on the PATH; install gcc, or pip install 'muse_jit[linker]'"
    )


def link(linker: list[str], object_path: str, library_path: str, runtime_library: str) -> None:
    """Link one object file into a shared library.

    `-nostdlib`: the object calls nothing of libc, and start-up files of the host would make the bytes depend on it.

    Raises:
        CompileError: the linker failed; its message and the command are the log.
    """
    command = [
        *linker,
        "-shared",
        "-nostdlib",
        "-s",
        "-Wl,--as-needed",
        "-Wl,--build-id=none",
        "-Wl,-Bsymbolic",
        "-o",
        library_path,
        object_path,
        runtime_library,
    ]
    try:
        done = subprocess.run(
            command, stdin=subprocess.DEVNULL, capture_output=True, text=True, errors="replace", timeout=_TIMEOUT
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        raise CompileError(f"the linker could not be run: {error}", shlex.join(command)) from None
    if done.returncode:
        log = f"{shlex.join(command)}\n{done.stdout}{done.stderr}"
        lines = (done.stderr or done.stdout).strip().splitlines()
        print(log, flush=True)  # into the worker's log
        raise CompileError(f"linking failed: {lines[0] if lines else f'exit code {done.returncode}'}", log)
