"""The `muse-cache` command. A verb's module is imported when the verb is used: `--help` starts in a blink.

Its own help is arranged by the questions that people come with; nobody has read anything before.
"""

import importlib
from typing import Any

import click

from muse_jit import __version__
from muse_jit.console import run

VERBS = {
    "What is in there, and is it used?": {
        "ls": "List entries: kernel, size, compile seconds, age, use, constants.",
        "stats": "Sums by kernel, arch, toolchain; how much is used, dead, damaged.",
        "report": "Write a page of pictures about the whole cache.",
        "path": "Print the cache folder.",
    },
    "Why did it recompile?": {
        "explain": "Hit or miss, and what differs from the nearest entry, old and new.",
        "diff": "Compare two entries, or two caches.",
    },
    "How good is this kernel?": {
        "show": "One entry in full; its machine code: --resources, --sass, --ptx.",
    },
    "Is it sound?": {
        "verify": "Check every entry byte by byte; --rebuild compiles and compares.",
        "doctor": "Check folder, locks, disk, linker, toolchain, driver of this host.",
    },
    "Can I delete it?": {
        "prune": "Delete by age, size, arch or toolchain; --dry-run only says what.",
        "clear": "Delete all entries.",
    },
}
"""Question to its verbs, each with a line of help."""

_EPILOG = """\
An entry is one compiled kernel, named by the digest of its key: kernel family, constants, target, toolchain, source,
options. If any of these changes, it is another kernel and is compiled anew. Verbs take the first digits of a digest.

Deleting is safe at any time: running processes keep what they loaded, and what is asked for again is compiled again.

\b
Examples:
  muse-cache stats                              how much, of what, is it used
  muse-cache ls --tree                          everything, and what differs
  muse-jit plan --arch sm_90a > plan.json
  muse-cache explain --plan plan.json           hit or miss, and why
  muse-cache show 57c3 --resources              registers, spills, instructions
  muse-cache prune --older-than 30d --dry-run   what would go
"""


class _Verbs(click.Group):
    """The verbs, listed under their questions, each imported when it is used."""

    def list_commands(self, context: click.Context) -> list[str]:
        return [name for verbs in VERBS.values() for name in verbs]

    def get_command(self, context: click.Context, name: str) -> click.Command | None:
        if name not in self.list_commands(context):
            return None
        command: click.Command = getattr(importlib.import_module(f"cache_tools.verbs.{name}"), name)
        return command

    def format_commands(self, context: click.Context, formatter: click.HelpFormatter) -> None:
        for question, verbs in VERBS.items():
            with formatter.section(question):
                formatter.write_dl([(name.ljust(8), text) for name, text in verbs.items()])

    def resolve_command(self, context: click.Context, args: list[str]) -> Any:
        try:
            return super().resolve_command(context, args)
        except click.UsageError:
            context.fail(f"no verb {args[0]!r}; the verbs are {', '.join(self.list_commands(context))}")


@click.group(cls=_Verbs, epilog=_EPILOG, context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(__version__, prog_name="muse-cache")
def main() -> None:
    """See what is in muse_jit's cache of compiled kernels, explain, check and tidy it.

    Every verb has --json, --cache-dir and --help. Nothing that is listed is ever run, and no GPU is needed.

    Exit codes: 0 fine, 1 something was found damaged, 2 wrong usage, 3 the cache cannot be used for what was asked.
    """


def entry() -> None:
    """The console script."""
    run(main, "muse-cache")


if __name__ == "__main__":
    entry()
