"""A compile service for CuTe DSL kernels: keyed on constants, compiled once per host, loaded without the compiler.

The folders are the data path:

    constants/   1. frozen constant sets; the fields are the key
    key/         2. constants, target, toolchain and source become one digest
    store/       3. look up (Hit | Miss with a reason)   4. lock   6. publish
    compiler/    5. the only door to cute.compile, in another process
    kernels/     device code, and the registry that names it by text
    loader/      7. a verified library becomes a callable Kernel
    ops/         8. runtime objects on torch tensors
    vllm_plugin/ 9. what vLLM starts by itself: learns constants, asks for kernels, hands runtime objects over
    service.py   all of it on one page: JitService

Importing this package imports none of torch, tvm_ffi and cutlass, takes no lock and touches no driver.
"""

from typing import Any

__version__ = "0.1.0"

# Name to module. Text, so that neither the import nor a kernel's source digest reaches further than it must.
_LAZY = {
    "ConstantSet": "muse_jit.constants.base",
    "DualNormConstants": "muse_jit.constants.dual_norm",
    "RowNormConstants": "muse_jit.constants.row_norm",
    "JitService": "muse_jit.service",
    "KernelKey": "muse_jit.key.kernel_key",
    "Settings": "muse_jit.settings",
    "Target": "muse_jit.key.target",
    "register_kernel": "muse_jit.kernels.registry",
    "MuseJitError": "muse_jit.errors",
}

__all__ = [*_LAZY, "__version__"]


def __getattr__(name: str) -> Any:
    if name not in _LAZY:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    import importlib

    value = getattr(importlib.import_module(_LAZY[name]), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
