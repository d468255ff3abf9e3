"""A kernel family without the compiler: its build is a few lines of C, its kernel returns a number.

Each real compile appends a line to `count_file`, so that a test can say how often it happened. The library exports
what tvm_ffi calls, and the call returns `value`, so that a test sees whose code it got.
"""

import dataclasses
import os
import subprocess
import time

from muse_jit.constants.base import ConstantSet
from muse_jit.kernels.registry import register_kernel

_SOURCE = """
#include <stdint.h>
typedef struct {{ int32_t type_index; uint32_t padding; int64_t value; }} any;
int __tvm_ffi_{symbol}(void *self, const any *args, int32_t count, any *result) {{
    result->type_index = 1; result->padding = 0; result->value = {value};
    return 0;
}}
"""


@dataclasses.dataclass(frozen=True, eq=False)
class ToyConstants(ConstantSet):
    """`behaviour`: ok, fail, error_line, crash, hang, silent, wrong_type."""

    value: int = 7
    count_file: str = ""
    seconds: float = 0.0
    behaviour: str = "ok"


class _Object:
    def __init__(self, value):
        self.value = value

    def export_to_c(self, path, *, function_name):
        source = _SOURCE.format(symbol=function_name, value=self.value)
        command = ["cc", "-c", "-fPIC", "-O1", "-x", "c", "-", "-o", path]
        subprocess.run(command, input=source, text=True, check=True)


def build(constants, target):
    if constants.count_file:
        with open(constants.count_file, "a") as file:
            file.write(f"{os.getpid()} {target.arch}\n")
    time.sleep(constants.seconds)
    if constants.behaviour == "fail":
        raise ValueError("the toy was told to fail")
    if constants.behaviour == "error_line":
        print("noise before")
        print("toy.py:1: error: operand #0 is of the wrong kind")
        raise RuntimeError("pass pipeline failed")
    if constants.behaviour == "crash":
        os.abort()
    if constants.behaviour == "hang":
        time.sleep(600)
    if constants.behaviour == "silent":
        os._exit(0)
    if constants.behaviour == "wrong_type":
        return object()
    return _Object(constants.value)


def rebuild(constants, target):
    """A second build function of the same module."""
    return build(constants, target)


register_kernel("toy", ToyConstants, "support.toy:build")


def compiles(path):
    """How many compiles a count file records."""
    return len(path.read_text().splitlines()) if path.exists() else 0
