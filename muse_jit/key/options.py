"""Compile options: settings of the DSL that change the generated code. What reaches the compiler goes through here.

The DSL reads about sixteen `CUTE_DSL_*` variables that it declares to affect compilation. The worker starts without
any of them; the ones listed here can be set, by name without the prefix, and are part of the key. ARCH and
ENABLE_TVM_FFI are decided by the target and the way kernels are called, DRYRUN compiles nothing.
"""

from muse_jit.errors import UsageError

PREFIX = "CUTE_DSL_"

ALLOWED = (
    "AUTO_M2S",
    "COMPILER_BACKEND",
    "COMPILER_OPT",
    "DEBUG",
    "ENABLE_ASSERTIONS",
    "ENABLE_PYIR",
    "LINEINFO",
    "LOC_TRACEBACKS",
    "TOLERATE_M2M",
    "WARNINGS_AS_ERRORS",
)


def check_options(pairs: tuple[tuple[str, str], ...]) -> dict[str, str]:
    """The options as they enter the key.

    Raises:
        UsageError: a name is not one that may be set.
    """
    for name, _ in pairs:
        if name not in ALLOWED:
            raise UsageError(f"compile option {name!r}; allowed: {', '.join(ALLOWED)}")
    return dict(pairs)


def as_environment(options: dict[str, str]) -> dict[str, str]:
    """The variables that hand checked options to the DSL in the worker."""
    return {PREFIX + name: value for name, value in options.items()}
