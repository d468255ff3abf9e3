"""Ages and sizes as people write them on a command line: callbacks of click options."""

import re

import click

from muse_jit.errors import UsageError
from muse_jit.settings import parse_bytes

_SECONDS = {"s": 1.0, "min": 60.0, "h": 3600.0, "d": 86400.0, "w": 7 * 86400.0}


def age(context: click.Context, parameter: click.Parameter, value: str | None) -> float | None:
    """An age such as 90s, 30min, 12h, 30d or 2w, in seconds. Raises `click.BadParameter`."""
    if value is None:
        return None
    match = re.fullmatch(r"(\d+(?:\.\d+)?)\s*(s|min|h|d|w)", value.strip())
    if match is None:
        raise click.BadParameter(f"{value!r}; it must be an age such as 90s, 30min, 12h, 30d or 2w")
    return float(match[1]) * _SECONDS[match[2]]


def size(context: click.Context, parameter: click.Parameter, value: str | None) -> int | None:
    """A size such as 500M, 2G or a number of bytes, in bytes. Raises `click.BadParameter`."""
    if value is None:
        return None
    try:
        return parse_bytes("the size", value.strip())
    except UsageError:
        raise click.BadParameter(f"{value!r}; it must be a size such as 500M, 2G or a number of bytes") from None
