"""What both commands do at their edges: exit codes, one-line errors, JSON on standard output, closed pipes."""

import contextlib
import json
import os
import signal
import sys
from collections.abc import Callable
from typing import Any

import click

from muse_jit.errors import CacheUnusable, ConstantsError, LinkerMissing, MuseJitError, ToolchainError, UsageError

OK, FAILED, USAGE, UNUSABLE = 0, 1, 2, 3
INTERRUPTED, TERMINATED = 130, 143


class _Terminated(BaseException):
    """SIGTERM, as `KeyboardInterrupt` is Ctrl-C: it unwinds the stack, so that workers end and files are closed."""


def run(command: click.Command, program: str) -> None:
    """Run a click command as a program: every expected error is one line on standard error and an exit code.

    0 fine; 1 something failed or was found damaged; 2 wrong usage; 3 the cache cannot be used for what was asked.
    """
    _take_any_character()
    with contextlib.suppress(ValueError):  # not the main thread: somebody embeds the command
        signal.signal(signal.SIGTERM, _terminate)
    code = _run(command, program)
    with contextlib.suppress(BrokenPipeError):
        sys.stdout.flush()
    sys.stderr.flush()
    # Without waiting for threads: after an interruption they still wait for compile workers, which end with us.
    os._exit(code)


def _take_any_character() -> None:
    """A locale without a character must not end a listing: it is written as its number."""
    for stream in (sys.stdout, sys.stderr):
        if hasattr(stream, "reconfigure"):
            stream.reconfigure(errors="backslashreplace")


def colour_wanted() -> bool:
    """Whether standard output is a terminal that shows colours to somebody who did not switch them off."""
    return sys.stdout.isatty() and not os.environ.get("NO_COLOR") and os.environ.get("TERM", "") not in ("", "dumb")


def _run(command: click.Command, program: str) -> int:
    try:
        result = command.main(prog_name=program, standalone_mode=False)
        return result if isinstance(result, int) else OK
    except click.exceptions.Exit as error:
        return error.exit_code
    except (click.Abort, KeyboardInterrupt):
        return _complain(program, "interrupted; what was finished is kept", INTERRUPTED)
    except _Terminated:
        return _complain(program, "terminated; what was finished is kept", TERMINATED)
    except click.UsageError as error:
        where = f" (see {error.ctx.command_path} --help)" if error.ctx is not None else ""
        return _complain(program, f"{error.format_message()}{where}", USAGE)
    except click.ClickException as error:
        return _complain(program, error.format_message(), USAGE)
    except (UsageError, ConstantsError) as error:
        return _complain(program, str(error), USAGE)
    except (CacheUnusable, LinkerMissing, ToolchainError) as error:
        return _complain(program, str(error), UNUSABLE)
    except MuseJitError as error:
        return _complain(program, str(error), FAILED)
    except SystemExit:
        # Without standalone mode click ends the process for one reason: the reader went away ("muse-cache ls | head").
        return OK


def _terminate(number: int, frame: object) -> None:
    raise _Terminated


def _complain(program: str, message: str, code: int) -> int:
    line = " ".join(message.split())
    print(f"{program}: {line}", file=sys.stderr)
    return code


def print_json(document: Any) -> None:
    """Exactly one JSON document on standard output."""
    print(json.dumps(document, indent=2, allow_nan=False))


def json_option(function: Callable[..., Any]) -> Callable[..., Any]:
    """The option every verb has."""
    return click.option("--json", "as_json", is_flag=True, help="Print one JSON document on standard output.")(function)


def cache_dir_option(function: Callable[..., Any]) -> Callable[..., Any]:
    """The option every verb has."""
    return click.option(
        "--cache-dir",
        type=click.Path(file_okay=False),
        callback=_absolute,
        help="The cache folder. Default: $MUSE_JIT_CACHE_DIR, $VLLM_CACHE_ROOT/muse_jit, or the user's cache folder.",
    )(function)


def _absolute(context: click.Context, parameter: click.Parameter, value: str | None) -> str | None:
    if value is None:
        return None
    if not value.strip():
        raise click.BadParameter("the folder's name is empty")
    return os.path.abspath(os.path.expanduser(value))


def size_text(size: int) -> str:
    """Bytes for people: 812 B, 28.9 KiB, 1.2 GiB."""
    if size < 1024:
        return f"{size} B"
    value = float(size)
    for unit in ("KiB", "MiB", "GiB"):
        value /= 1024
        if value < 1024 or unit == "GiB":
            break
    return f"{value:.1f} {unit}"
