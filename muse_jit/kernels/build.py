"""The one place where this package's kernels meet `cute.compile`.

Raises: whatever the compiler raises; the worker process turns it into a `CompileError` with the log.
"""

from pathlib import Path
from typing import Any, Protocol

import cutlass
from cutlass import cute
from cutlass.cute.runtime import make_fake_compact_tensor, make_fake_stream

ELEMENTS = {"bf16": cutlass.BFloat16, "fp32": cutlass.Float32}


class Target(Protocol):
    """What a kernel may know of where it will run."""

    @property
    def arch(self) -> str: ...


def compile_for(target: Target, host_fn: Any, *args: Any, dump_dir: Path | None = None) -> Any:
    """`cute.compile(host_fn, *args, stream)` for one architecture, callable through TVM-FFI.

    The stream is the last parameter of `host_fn` and no operand: at run time it is the caller's current one.
    `dump_dir`, an existing folder, receives the PTX and the cubin (for tests and inspection).
    """
    options = f"--enable-tvm-ffi --gpu-arch {target.arch}"
    if dump_dir is not None:
        options += f" --keep-ptx --keep-cubin --dump-dir {dump_dir}"
    return cute.compile(host_fn, *args, make_fake_stream(use_tvm_ffi_env_stream=True), options=options)


def symbolic_rows() -> Any:
    """A row count known only at run time; share one object among operands that must agree on it."""
    return cute.sym_int()


def row_tensor(dtype: str, rows: Any, width: int) -> Any:
    """A contiguous [rows, width] operand. A row is a whole number of vectors, so each row starts aligned."""
    return make_fake_compact_tensor(ELEMENTS[dtype], (rows, width), stride_order=(1, 0), assumed_align=_align(dtype))


def vector_tensor(dtype: str, width: int) -> Any:
    """A contiguous [width] operand, such as a weight."""
    return make_fake_compact_tensor(ELEMENTS[dtype], (width,), assumed_align=_align(dtype))


def _align(dtype: str) -> int:
    """Eight elements, which one thread moves together: 16 bytes of BF16, 32 of FP32."""
    return ELEMENTS[dtype].width
