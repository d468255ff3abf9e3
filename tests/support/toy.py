"""A kernel family without the compiler: its build is a few lines of C, its kernel returns a number.

Each real compile appends a line to `count_file`, so that a test can say how often it happened. The library exports
what tvm_ffi calls, and the call returns `value`, so that a test sees whose code it got.
"""

import dataclasses
import os
import signal
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
    """`behaviour`: ok, fail, error_line, crash, hang, silent, wrong_type; child (starts a process that outlives the
    compile; its id goes to `count_file` + ".child"); killed, killed_in_export, killed_at_result (the worker gets
    SIGKILL at that step); stopped (it gets SIGSTOP). With "_once" at its end: only the first compile of `count_file`.
    """

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


class _Torn:
    """Writes the beginning of an object file and dies."""

    def export_to_c(self, path, *, function_name):
        with open(path, "wb") as file:
            file.write(b"\x7fELF\x02\x01\x01")
        os.kill(os.getpid(), signal.SIGKILL)


def _start_child(constants):
    child = subprocess.Popen(["sleep", "600"], stdin=subprocess.DEVNULL)
    with open(constants.count_file + ".child", "a") as file:
        file.write(f"{child.pid}\n")


def build(constants, target):
    if constants.count_file:
        with open(constants.count_file, "a") as file:
            file.write(f"{os.getpid()} {target.arch}\n")
    behaviour = constants.behaviour
    if behaviour.endswith("_once"):
        with open(constants.count_file) as file:
            behaviour = behaviour.removesuffix("_once") if len(file.readlines()) == 1 else "ok"
    if behaviour == "child":
        _start_child(constants)
    began = time.monotonic()
    time.sleep(constants.seconds)
    if constants.count_file:
        with open(constants.count_file + ".times", "a") as file:
            file.write(f"{began} {time.monotonic()} {os.getppid()}\n")
    if behaviour == "killed":
        os.kill(os.getpid(), signal.SIGKILL)
    if behaviour == "stopped":
        os.kill(os.getpid(), signal.SIGSTOP)
    if behaviour == "killed_in_export":
        return _Torn()
    if behaviour == "killed_at_result":
        os.rename = lambda source, target: os.kill(os.getpid(), signal.SIGKILL)
    if behaviour == "fail":
        raise ValueError("the toy was told to fail")
    if behaviour == "error_line":
        print("noise before")
        print("toy.py:1: error: operand #0 is of the wrong kind")
        raise RuntimeError("pass pipeline failed")
    if behaviour == "crash":
        os.abort()
    if behaviour == "hang":
        time.sleep(600)
    if behaviour == "silent":
        os._exit(0)
    if behaviour == "wrong_type":
        return object()
    return _Object(constants.value)


def rebuild(constants, target):
    """A second build function of the same module."""
    return build(constants, target)


register_kernel("toy", ToyConstants, "support.toy:build")


def times(path):
    """(begin, end, server's process id) of each compile a count file records; begin and end by `time.monotonic`."""
    lines = path.with_name(path.name + ".times").read_text().splitlines()
    return [(float(begin), float(end), int(server)) for begin, end, server in map(str.split, lines)]


def compiles(path):
    """How many compiles a count file records."""
    return len(path.read_text().splitlines()) if path.exists() else 0
