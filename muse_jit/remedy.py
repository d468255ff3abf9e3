"""The command that would have filled the cache, for error messages: it can be pasted into a shell as it is."""

import json

from muse_jit.constants.base import ConstantSet
from muse_jit.key.target import Target
from muse_jit.settings import Settings


def warmup_command(constants: ConstantSet, target: Target, root: str, settings: Settings) -> str:
    """`muse-jit warmup` for exactly one constant set on one target, into one cache folder.

    With what of this process's settings would keep it from filling that cache, or is part of the key.
    """
    import shlex

    kernel = {"kernel": constants.family, "arch": target.arch, "constants": constants.as_dict()}
    plan = json.dumps({"schema": 1, "kernels": [kernel]})
    words = ["muse-jit", "warmup", "--cuda", str(target.cuda), "--cache-dir", root, "--plan", plan]
    variables = ["MUSE_JIT_MODE=auto"] if settings.mode in ("forbid", "readonly", "off") else []
    if settings.compile_options:
        options = ",".join(f"{name}={value}" for name, value in settings.compile_options)
        variables.append(f"MUSE_JIT_COMPILE_OPTIONS={options}")
    return shlex.join([*(["env", *variables] if variables else []), *words])
