"""Run Python in a child process, with modules that must not be imported blocked."""

import os
import pathlib
import subprocess
import sys

ROOT = pathlib.Path(__file__).resolve().parents[2]


def environment(**variables):
    """This process's environment without settings of the package, and with `variables`."""
    kept = {k: v for k, v in os.environ.items() if not k.startswith(("MUSE_JIT_", "VLLM_", "CUTE_DSL_")) and k != "CC"}
    return {**kept, "PYTHONPATH": str(ROOT / "tests"), **{k: str(v) for k, v in variables.items()}}


ATTENTIVE = "import signal; signal.signal(signal.SIGINT, signal.default_int_handler); "
"""Ctrl-C interrupts a child also where the tests run in the background of a shell, which has it ignored."""


def start(code, *, block=(), **variables):
    """Start `code`; modules in `block` cannot be imported in it."""
    blocked = ATTENTIVE + "".join(f"sys.modules[{name!r}] = None; " for name in block)
    return subprocess.Popen(
        [sys.executable, "-c", f"import sys; {blocked}\n{code}"],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        cwd=ROOT,
        env=environment(**variables),
    )


def run(code, *, block=(), timeout=120, **variables):
    """Run `code` to its end and return its standard output; a failure fails the test with its standard error."""
    process = start(code, block=block, **variables)
    out, err = process.communicate(timeout=timeout)
    assert process.returncode == 0, err
    return out


def alive(pid):
    """Whether a process runs; one that ended and was not collected yet does not."""
    try:
        with open(f"/proc/{pid}/stat") as file:
            return file.read().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


def command(name, *arguments, block=(), timeout=120, before="", **variables):
    """Run a console script's entry, after the statement `before`; returns (exit code, output, errors)."""
    module = {"muse-jit": "muse_jit.cli", "muse-cache": "cache_tools.cli"}[name]
    code = f"{before}\nsys.argv[1:] = {[str(a) for a in arguments]!r}\nfrom {module} import entry\nentry()"
    process = start(code, block=block, **variables)
    out, err = process.communicate(timeout=timeout)
    return process.returncode, out, err
