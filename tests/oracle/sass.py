"""What the assembler made of a kernel: instruction counts by nvdisasm, registers and local memory from the cubin."""

import collections
import pathlib
import re
import shutil
import subprocess
import sys
import tempfile

import pytest

from muse_jit.store.cubin import resources


def _nvdisasm() -> str | None:
    bundled = pathlib.Path(sys.prefix).glob("lib/python*/site-packages/nvidia/*/bin/nvdisasm")
    return next((str(path) for path in bundled), shutil.which("nvdisasm"))


needs_nvdisasm = pytest.mark.skipif(_nvdisasm() is None, reason="needs nvdisasm (nvidia-cuda-nvdisasm)")


def instruction_counts(cubin: bytes) -> collections.Counter[str]:
    """Mnemonic (FMUL, LDG, ...) to how often it stands in the machine code of all kernels."""
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        command = [str(_nvdisasm()), "-c", file.name]
        text = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    return collections.Counter(re.findall(r"/\*[0-9a-f]{4,}\*/\s+(?:@!?U?P\d+ )?([A-Z0-9]+)", text))


def registers(cubin: bytes) -> list[int]:
    """Registers a thread of each kernel, fewest first."""
    return sorted(kernel["registers"] for kernel in resources(cubin))


def local_bytes(cubin: bytes) -> list[int]:
    """Stack and spills of each kernel."""
    return [kernel["local_bytes"] for kernel in resources(cubin)]
