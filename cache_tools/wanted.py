"""What `explain` is asked about: kernels of a plan, a constant set as JSON, or a digest."""

import json
import os
from typing import Any

from muse_jit.constants.base import ConstantSet
from muse_jit.errors import ConstantsError, UsageError
from muse_jit.kernels.registry import family_named
from muse_jit.key.target import check_arch, device_arch
from muse_jit.plan import read_plan

_FORM = '{"kernel": "row_norm", "arch": "sm_90a", "constants": {...}}'


def from_plan(path: str, arch: str | None) -> list[tuple[ConstantSet, str]]:
    """The constant sets and architectures of a plan. Raises `UsageError`, `ConstantsError`."""
    return [(p.constants, p.arch) for p in read_plan(path, [check_arch(arch)] if arch else ()).kernels]


def from_json(text: str, arch: str | None) -> list[tuple[ConstantSet, str]]:
    """The constant set that a JSON text, or the file of that name, describes; a plan's file is taken as a plan.

    Raises:
        UsageError: it is no such JSON, or names no architecture and no device can be asked.
        ConstantsError: the constants are not possible.
    """
    where = "the constants"
    if not text.lstrip().startswith("{"):
        where = text
        try:
            with open(text, encoding="utf-8") as file:
                content = file.read()
        except (OSError, ValueError) as error:
            reason = error.strerror if isinstance(error, OSError) else "not UTF-8 text"
            raise UsageError(
                f"{text!r} is neither a digest's first digits, JSON such as {_FORM}, nor a file with it ({reason})"
            ) from None
    else:
        content = text
    try:
        document = json.loads(content)
    except (ValueError, RecursionError) as error:
        raise UsageError(f"{where}: not JSON ({error}); give an object such as {_FORM}") from None
    if isinstance(document, dict) and isinstance(document.get("kernels"), list) and os.path.isfile(text):
        return from_plan(text, arch)
    return [_constants(where, document, arch)]


def _constants(where: str, document: Any, arch: str | None) -> tuple[ConstantSet, str]:
    kernel = document.get("kernel") if isinstance(document, dict) else None
    if not isinstance(kernel, str) or not isinstance(document.get("constants"), dict):
        raise UsageError(f"{where}: kernel and constants are needed, as in {_FORM}")
    named = arch or document.get("arch")
    try:
        constants = family_named(kernel).constants_class.from_dict(document["constants"])
    except (UsageError, ConstantsError) as error:
        raise type(error)(f"{where}: {error}") from None
    return constants, check_arch(named) if named is not None else device_arch()
