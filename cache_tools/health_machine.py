"""What `doctor` asks of the machine: linker, toolchain, runtime library, driver."""

import ctypes
import os
import tempfile
from collections.abc import Iterator

from cache_tools.health import FAIL, OK, WARN, Check
from muse_jit.compiler.link import find_linker
from muse_jit.errors import LinkerMissing, ToolchainError
from muse_jit.key.target import host_arch
from muse_jit.key.toolchain import Toolchain, identify, runtime_library
from muse_jit.settings import Settings
from muse_jit.store.layout import Layout
from muse_jit.store.publish import recorded_toolchains


def machine_checks(layout: Layout, settings: Settings) -> Iterator[Check]:
    """The checks of what compiles and what loads kernels here."""
    yield _linker(settings.cc)
    toolchain, check = _toolchain(layout, settings)
    yield check
    if toolchain is not None:
        yield _runtime(toolchain.cuda, settings)
    yield _driver(toolchain)


def _linker(cc: str | None) -> Check:
    """Found, and able to make a shared library of nothing."""
    import subprocess  # 20 ms

    try:
        command = find_linker(cc)
    except LinkerMissing as error:
        message, _, remedy = str(error).partition("; ")
        return Check("linker", WARN, f"{message}: what is in the cache is used, nothing can be compiled", remedy)
    with tempfile.TemporaryDirectory(prefix="muse_jit-") as folder:
        target = os.path.join(folder, "nothing.so")
        try:
            done = subprocess.run(
                [*command, "-shared", "-nostdlib", "-x", "c", "-", "-o", target],
                input=b"", capture_output=True, timeout=120, check=False,
            )  # fmt: skip
        except (OSError, subprocess.TimeoutExpired) as error:
            return Check("linker", FAIL, f"{command[0]} could not be run: {error}", "install gcc, or set CC")
    if done.returncode:
        lines = done.stderr.decode("utf-8", "replace").strip().splitlines()
        return Check("linker", FAIL, f"{command[0]} cannot link: {lines[0] if lines else done.returncode}",
                     "install gcc, or set CC")  # fmt: skip
    return Check("linker", OK, f"{' '.join(command)} links")


def _toolchain(layout: Layout, settings: Settings) -> tuple[Toolchain | None, Check]:
    """Identified by content; the installed bytes are compared with what the distributions recorded."""
    try:
        found = identify(settings.cuda, host_arch(), check="bytes", recorded=recorded_toolchains(layout))
    except ToolchainError as error:
        message, _, remedy = str(error).partition("; ")
        return None, Check("toolchain", FAIL, message, remedy)
    dsl = found.parts.get("nvidia-cutlass-dsl")
    version = dsl.get("version") if isinstance(dsl, dict) else "?"
    shown = f"{found.digest[:12]}: nvidia-cutlass-dsl {version}, CUDA {found.cuda}, {found.host}"
    if found.modified:
        named = ", ".join(found.modified[:3]) + (", ..." if len(found.modified) > 3 else "")
        message = f"{shown}; {len(found.modified)} installed files are not those that were recorded: {named}"
        remedy = "reinstall nvidia-cutlass-dsl, or set MUSE_JIT_TOOLCHAIN_CHECK=bytes"
        return found, Check("toolchain", FAIL, message, remedy)
    if found.origin != "installed":
        message = f"{shown}, as the cache recorded it; no compiler is installed: what is in the cache is used, no more"
        return found, Check("toolchain", WARN, message, "pip install nvidia-cutlass-dsl[cu13], to compile here")
    return found, Check("toolchain", OK, f"{shown}; the installed bytes are the recorded ones")


def _runtime(cuda: int, settings: Settings) -> Check:
    try:
        return Check("runtime", OK, runtime_library(cuda, settings.runtime_lib))
    except ToolchainError as error:
        message, _, remedy = str(error).partition("; ")
        return Check("runtime", FAIL, f"{message}: no kernel can be loaded", remedy or "unset MUSE_JIT_RUNTIME_LIB")


def _driver(toolchain: Toolchain | None) -> Check:
    """Asked for its version only: no device is touched."""
    version = ctypes.c_int()
    try:
        code = ctypes.CDLL("libcuda.so.1").cuDriverGetVersion(ctypes.byref(version))
    except (OSError, AttributeError):
        return Check("driver", OK, "none: kernels can be compiled here for a named architecture, not run")
    major, minor = version.value // 1000, version.value % 1000 // 10
    if code:
        return Check("driver", WARN, f"it does not answer (error {code})", "reinstall the NVIDIA driver")
    if toolchain is not None and major < toolchain.cuda:
        return Check("driver", FAIL, f"it supports CUDA {major}.{minor}, kernels are made for CUDA {toolchain.cuda}",
                     f"MUSE_JIT_CUDA={major}, or a newer driver")  # fmt: skip
    return Check("driver", OK, f"supports CUDA {major}.{minor}")
