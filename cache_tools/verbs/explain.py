"""`muse-cache explain`."""

import click

from cache_tools import clock
from cache_tools.describe import age_text, constants_text, printable, value_text
from cache_tools.explain import Explanation, explain_constants, explain_digest
from cache_tools.opening import is_prefix, layout_of, must_exist, settings_of
from cache_tools.standing import Standings
from cache_tools.table import print_line, print_table
from cache_tools.wanted import from_json, from_plan
from muse_jit.console import FAILED, OK, cache_dir_option, json_option, print_json
from muse_jit.errors import UsageError
from muse_jit.key.difference import Difference

_COLOURS = {"hit": "green", "miss": "red", "dead": "yellow"}


@click.command()
@click.argument("what", required=False)
@click.option("--plan", "plan_file", help="Explain every kernel of a FILE that `muse-jit plan` wrote.")
@click.option("--arch", help="For this GPU architecture, whatever the plan or the constants say.")
@click.option("--all-parts", is_flag=True, help="Every leaf that differs, also those inside toolchains.")
@cache_dir_option
@json_option
def explain(
    what: str | None, plan_file: str | None, arch: str | None, all_parts: bool, cache_dir: str | None, as_json: bool
) -> int:
    """Say whether a kernel would be found, and if not, why: what differs from the nearest entry, old and new.

    Of one that is found, what differs from the nearest entry made before it: why it was compiled.

    WHAT is the first digits of a digest, or a constant set: JSON such as '{"kernel": "row_norm", "arch": "sm_90a",
    "constants": {"hidden": 8192, ...}}', or the name of a file with that. With --plan, every kernel of a plan.

    For constants the key is made as a service here would make it, with the toolchain and source that are installed.
    """
    if (what is None) == (plan_file is None):
        raise UsageError("explain takes one of these: a digest, constants as JSON, or --plan FILE")
    settings = settings_of(cache_dir)
    layout, _ = layout_of(settings)
    must_exist(layout)
    standings = Standings(layout)
    if what is not None and is_prefix(what):
        found = [explain_digest(layout, settings, standings, what.lower())]
    else:
        wanted = from_plan(plan_file, arch) if plan_file is not None else from_json(what or "", arch)
        found = explain_constants(layout, settings, standings, wanted)
    if as_json:
        print_json({"cache_dir": layout.root, "kernels": [e.as_dict() for e in found]})
    else:
        for explanation in found:
            _print(explanation, all_parts)
        if len(found) > 1:
            hits = sum(e.status == "hit" for e in found)
            print_line(f"{len(found)} kernels: {hits} hit, {len(found) - hits} miss")
    return FAILED if any(e.damaged for e in found) else OK


def _print(explanation: Explanation, all_parts: bool) -> None:
    name = f"{printable(explanation.kernel or '?')} {printable(explanation.arch or '')}".strip()
    print_line(f"{explanation.status:4}  {explanation.digest[:12]}  {name}", _COLOURS[explanation.status])
    if explanation.constants is not None:
        print_line(f"      {constants_text(explanation.constants)}")
    if explanation.reason is not None:
        print_line(
            "      reason: " + printable(explanation.reason + (f", {explanation.detail}" if explanation.detail else ""))
        )
    elif explanation.detail:
        print_line(f"      {printable(explanation.detail)}")
    if explanation.status == "miss" and explanation.nearest is None and explanation.kernel is not None:
        print_line(f"      the cache has no other entry of {printable(explanation.kernel)}")
    if explanation.status == "hit" and explanation.created is not None:
        made = f"      made {age_text(clock.now() - explanation.created)} ago"
        if explanation.nearest is not None:
            made += f"; the nearest entry before it, {explanation.nearest.digest[:12]}, differs in:"
        print_line(made)
    if explanation.nearest is None:
        return
    if explanation.status == "miss":
        print_line(f"      nearest entry {explanation.nearest.digest[:12]}, which differs in:")
    print_differences(explanation.differences, all_parts)


def print_differences(parts: list[Difference], all_parts: bool, indent: str = "      ") -> None:
    """A table of what differs, old and new; of a toolchain, unless all is asked for, only versions where they tell."""
    shown = parts if all_parts else _telling(parts)
    rows = [(printable(d.part), _short(d.old, all_parts), _short(d.new, all_parts)) for d in shown]
    print_table(("PART OF THE KEY", "OLD", "NEW"), rows, indent=indent + "  ")
    if len(shown) < len(parts):
        print_line(f"{indent}  ({len(parts) - len(shown)} more leaves of the same parts; --all-parts shows them)")


def _telling(parts: list[Difference]) -> list[Difference]:
    """Where a distribution's version changed, its digests changed, too, and need not be read."""
    changed = {
        d.part.rpartition(".")[0] for d in parts if d.part.startswith("toolchain.") and d.part.endswith(".version")
    }
    return [d for d in parts if d.part.rpartition(".")[0] not in changed or d.part.endswith(".version")]


def _short(value: object, whole: bool) -> str:
    text = value_text(value)
    return text if whole or len(text) <= 40 else f"{text[:16]}...{text[-4:]}"
