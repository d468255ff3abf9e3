"""The command that would have filled the cache, for error messages: it can be pasted into a shell as it is."""

import json

from muse_jit.constants.base import ConstantSet
from muse_jit.key.target import Target


def warmup_command(constants: ConstantSet, target: Target, root: str) -> str:
    """`muse-jit warmup` for exactly one constant set on one target, into one cache folder."""
    import shlex

    kernel = {"kernel": constants.family, "arch": target.arch, "constants": constants.as_dict()}
    plan = json.dumps({"schema": 1, "kernels": [kernel]})
    words = ["muse-jit", "warmup", "--cuda", str(target.cuda), "--cache-dir", root, "--plan", plan]
    return shlex.join(words)
