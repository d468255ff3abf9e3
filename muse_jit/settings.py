"""Every environment variable this package reads, read once into one frozen object.

    MUSE_JIT_CACHE_DIR          the cache folder; an absolute path
    VLLM_CACHE_ROOT             (vLLM's) the cache is its subfolder muse_jit when MUSE_JIT_CACHE_DIR is unset
    MUSE_JIT_MODE               auto | readonly | forbid | verify | off
    MUSE_JIT_LATE_COMPILE       warn | error | silent: a miss after the engine said that it serves
    MUSE_JIT_CUDA               12 | 13: the CUDA major version to compile for; default: the newest installed compiler
    MUSE_JIT_SHARE              owner | group | all: who may read the cache
    MUSE_JIT_TOOLCHAIN_CHECK    record | bytes: trust the distributions' RECORDs, or hash the installed files
    MUSE_JIT_RUNTIME_LIB        path of libcute_dsl_runtime.so where no nvidia-cutlass-dsl-libs-cu* is installed
    MUSE_JIT_COMPILE_OPTIONS    NAME=VALUE,...: CUTE_DSL_* settings that change the code; they become part of the key
    MUSE_JIT_COMPILE_TIMEOUT    seconds one compile may take
    MUSE_JIT_STALL_LIMIT        seconds a waiter gives the holder of a key's lock before one waiter takes over;
                                default: the compile timeout and the time a holder may wait for a worker's place
    MUSE_JIT_MAX_BYTES          size the cache is pruned to, least recently used first: 500M, 2G, or a number of bytes
    MUSE_JIT_WORKERS            compile workers at a time on this host; default: as many as CPUs and memory allow
    MUSE_JIT_STRICT             0 | 1: trouble of the cache itself raises instead of costing a warning and a compile
    MUSE_JIT_VLLM               auto | warm | 0: the vLLM plugin replaces stock calls whose bits are equal, only fills
                                the cache, or is off
    CC                          the compiler driver to link with

An unset, empty or blank variable means the default; a malformed one raises `UsageError` naming it. No other module
reads the environment, but for handing it on to child processes.
"""

import dataclasses
import os
import re
from collections.abc import Mapping
from typing import Any

from muse_jit.errors import UsageError

MODES = ("auto", "readonly", "forbid", "verify", "off")
LATE_COMPILES = ("warn", "error", "silent")
SHARES = ("owner", "group", "all")
TOOLCHAIN_CHECKS = ("record", "bytes")
VLLM_MODES = ("auto", "warm", "0")


SLOT_SECONDS = 300.0
"""How long a compile waits for a place among the host's workers before it starts all the same."""


@dataclasses.dataclass(frozen=True)
class Settings:
    """What a process was told; `origins` says for each field whether by default, environment or option."""

    cache_dir: str | None = None
    vllm_cache_root: str | None = None
    mode: str = "auto"
    late_compile: str = "warn"
    cuda: int | None = None
    share: str = "owner"
    toolchain_check: str = "record"
    runtime_lib: str | None = None
    compile_options: tuple[tuple[str, str], ...] = ()
    compile_timeout: float = 900.0
    stall_limit: float | None = None
    max_bytes: int = 2 << 30
    workers: int | None = None
    strict: bool = False
    vllm: str = "auto"
    cc: str | None = None
    origins: Mapping[str, str] = dataclasses.field(default_factory=dict)

    @classmethod
    def from_environ(cls, environ: Mapping[str, str] | None = None) -> "Settings":
        """Read `environ` (default: this process's).

        Raises:
            UsageError: a variable is malformed; names it, its value and what is allowed.
        """
        environ = os.environ if environ is None else environ
        values: dict[str, Any] = {}
        for field, (variable, parse) in _VARIABLES.items():
            text = environ.get(variable, "").strip()
            if text:
                values[field] = parse(variable, text)
        return cls(**values, origins={field: f"environment ({_VARIABLES[field][0]})" for field in values})

    @property
    def patience(self) -> float:
        """Seconds to wait for the holder of a key's lock: longer than a healthy one can take."""
        return self.compile_timeout + SLOT_SECONDS if self.stall_limit is None else self.stall_limit

    def with_options(self, **options: Any) -> "Settings":
        """A copy in which the options that are not None win over what was there."""
        given = {name: value for name, value in options.items() if value is not None}
        origins = {**self.origins, **dict.fromkeys(given, "option")}
        return dataclasses.replace(self, **given, origins=origins)

    def describe(self) -> dict[str, dict[str, Any]]:
        """Field name to its value, origin and variable, for `muse-jit env`."""
        return {
            field: {
                "value": dict(self.compile_options) if field == "compile_options" else getattr(self, field),
                "origin": self.origins.get(field, "default"),
                "variable": variable,
            }
            for field, (variable, _) in _VARIABLES.items()
        }


def _path(variable: str, text: str) -> str:
    # A list such as "/a:/b" in a single-path variable otherwise becomes one strange folder name.
    if not os.path.isabs(os.path.expanduser(text)):
        raise UsageError(f"{variable} is {text!r}; it must be an absolute path")
    if os.pathsep in text:
        raise UsageError(f"{variable} is {text!r}; it must be one path, not a list separated by {os.pathsep!r}")
    return os.path.expanduser(text)


def _choice(*allowed: str) -> Any:
    def parse(variable: str, text: str) -> str:
        if text not in allowed:
            raise UsageError(f"{variable} is {text!r}; allowed: {', '.join(allowed)}")
        return text

    return parse


def _cuda(variable: str, text: str) -> int:
    if text not in ("12", "13"):
        raise UsageError(f"{variable} is {text!r}; allowed: 12, 13")
    return int(text)


def parse_bytes(variable: str, text: str) -> int:
    """ "500M", "2G", "1.5 GiB" or a number of bytes; the letters are powers of 1024.

    Raises:
        UsageError: it is none of these.
    """
    match = re.fullmatch(r"(\d+(?:\.\d+)?)\s*(?:([KMGT])(?:i?B)?|B)?", text, re.IGNORECASE)
    if match is None:
        raise UsageError(f"{variable} is {text!r}; it must be a size such as 500M, 2G or a number of bytes")
    return int(float(match[1]) * 1024 ** " KMGT".index((match[2] or " ").upper()))


def _count(variable: str, text: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        raise UsageError(f"{variable} is {text!r}; it must be a whole number from 1")
    return int(text)


def _switch(variable: str, text: str) -> bool:
    if text not in ("0", "1"):
        raise UsageError(f"{variable} is {text!r}; allowed: 0, 1")
    return text == "1"


def _seconds(variable: str, text: str) -> float:
    try:
        seconds = float(text)
    except ValueError:
        seconds = -1.0
    if not 0.0 < seconds < float("inf"):
        raise UsageError(f"{variable} is {text!r}; it must be a positive number of seconds")
    return seconds


def parse_compile_options(source: str, text: str) -> tuple[tuple[str, str], ...]:
    """ "LINEINFO=1,ENABLE_ASSERTIONS=1" as sorted pairs; the names are checked where they are used (`key.options`).

    Raises:
        UsageError: a part is not NAME=VALUE or a name stands twice.
    """
    pairs: dict[str, str] = {}
    for part in filter(None, (p.strip() for p in text.split(","))):
        name, equals, value = part.partition("=")
        if not equals or not name.strip() or name.strip() in pairs:
            raise UsageError(f"{source} has {part!r}; it must be NAME=VALUE,NAME=VALUE with each name once")
        pairs[name.strip()] = value.strip()
    return tuple(sorted(pairs.items()))


def _command(variable: str, text: str) -> str:
    if text.startswith(os.pathsep):
        raise UsageError(f"{variable} is {text!r}; it must be a command, not a list separated by {os.pathsep!r}")
    return text


_VARIABLES: dict[str, tuple[str, Any]] = {
    "cache_dir": ("MUSE_JIT_CACHE_DIR", _path),
    "vllm_cache_root": ("VLLM_CACHE_ROOT", _path),
    "mode": ("MUSE_JIT_MODE", _choice(*MODES)),
    "late_compile": ("MUSE_JIT_LATE_COMPILE", _choice(*LATE_COMPILES)),
    "cuda": ("MUSE_JIT_CUDA", _cuda),
    "share": ("MUSE_JIT_SHARE", _choice(*SHARES)),
    "toolchain_check": ("MUSE_JIT_TOOLCHAIN_CHECK", _choice(*TOOLCHAIN_CHECKS)),
    "runtime_lib": ("MUSE_JIT_RUNTIME_LIB", _path),
    "compile_options": ("MUSE_JIT_COMPILE_OPTIONS", parse_compile_options),
    "compile_timeout": ("MUSE_JIT_COMPILE_TIMEOUT", _seconds),
    "stall_limit": ("MUSE_JIT_STALL_LIMIT", _seconds),
    "max_bytes": ("MUSE_JIT_MAX_BYTES", parse_bytes),
    "workers": ("MUSE_JIT_WORKERS", _count),
    "strict": ("MUSE_JIT_STRICT", _switch),
    "vllm": ("MUSE_JIT_VLLM", _choice(*VLLM_MODES)),
    "cc": ("CC", _command),
}
