"""Narrow and wide terminals, NO_COLOR, closed pipes, locales without the characters."""

import json
import subprocess
import sys

import pytest
from support import fixed
from support.fixed import KEYS
from support.process import command, environment
from support.terminal import on_terminal, plain

pytestmark = pytest.mark.processes


@pytest.fixture(scope="module")
def cache(tmp_path_factory):
    return fixed.fill(tmp_path_factory.mktemp("fixed") / "cache")


CONSTANTS = json.dumps({"kernel": "row_norm", "arch": "sm_90a",
                        "constants": {"hidden": 64, "eps": 1e-5, "has_weight": True}})  # fmt: skip
VERBS = {
    "ls": ["ls"],
    "tree": ["ls", "--tree"],
    "show": ["show", KEYS["plain"].digest],
    "resources": ["show", KEYS["plain"].digest, "--resources"],
    "stats": ["stats"],
    "verify": ["verify"],
    "explain": ["explain", CONSTANTS],
    "explain_digest": ["explain", KEYS["plain"].digest],
    "diff": ["diff", KEYS["plain"].digest, KEYS["used"].digest],
    "prune": ["prune", "--max-size", "1", "--dry-run"],
}


@pytest.mark.parametrize("verb", VERBS)
@pytest.mark.parametrize("columns", [40, 200])
def test_no_line_is_longer_than_the_terminal(cache, verb, columns):
    code, text = on_terminal([*VERBS[verb], "--cache-dir", cache.root], columns)
    assert code == (1 if verb == "verify" else 0), text
    lines = plain(text).splitlines()
    assert lines
    assert max(map(len, lines)) <= columns


def test_a_wide_terminal_shows_all_columns_and_a_narrow_one_those_that_matter(cache):
    wide = plain(on_terminal(["ls", "--cache-dir", cache.root], 200)[1]).splitlines()
    assert wide[0].split() == ["DIGEST", "KERNEL", "ARCH", "SIZE", "COMPILE", "AGE", "USED", "CONSTANTS"]
    narrow = plain(on_terminal(["ls", "--cache-dir", cache.root], 50)[1]).splitlines()
    assert narrow[0].split()[:2] == ["DIGEST", "KERNEL"]
    assert "CONSTANTS" in narrow[0]
    assert "COMPILE" not in narrow[0]
    assert any(line.endswith("…") for line in narrow)


def test_colours_on_a_terminal_and_none_with_no_color_or_on_a_dumb_one(cache):
    arguments = ["verify", "--cache-dir", cache.root]
    assert "\x1b[31m" in on_terminal(arguments, 100)[1]
    assert "\x1b" not in on_terminal(arguments, 100, NO_COLOR="1")[1]
    assert "\x1b[31m" in on_terminal(arguments, 100, NO_COLOR="")[1]  # empty means unset
    assert "\x1b" not in on_terminal(arguments, 100, TERM="dumb")[1]


def test_no_colour_and_no_cut_in_a_pipe(cache):
    code, out, _ = command("muse-cache", "ls", "--cache-dir", cache.root, COLUMNS=20)
    assert code == 0
    assert "\x1b" not in out
    assert "behaviour=spill" in out


@pytest.mark.parametrize("verb", VERBS)
@pytest.mark.parametrize("lines", [0, 1])
def test_a_reader_that_goes_away_is_no_error(cache, verb, lines):
    """`muse-cache ls | head -n 1`, and a reader that never was there."""
    code = f"import sys; sys.argv[1:] = {[*VERBS[verb], '--cache-dir', cache.root]!r}\n"
    code += "from cache_tools.cli import entry\nentry()"
    process = subprocess.Popen(
        [sys.executable, "-u", "-c", code], stdout=subprocess.PIPE, stderr=subprocess.PIPE, env=environment()
    )
    for _ in range(lines):
        process.stdout.readline()
    process.stdout.close()
    err = process.stderr.read().decode()
    assert err == ""
    assert process.wait(timeout=60) in (0, 1)


@pytest.mark.parametrize("verb", VERBS)
def test_a_locale_without_the_characters_ends_nothing(tmp_path, verb):
    cache = fixed.fill(tmp_path / "cäche\N{SNOWMAN}")
    fixed.put(cache, fixed.key(90, kernel="größe\N{SNOWMAN}"))
    ascii_only = {"LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0", "PYTHONIOENCODING": "ascii:strict"}
    code, out, err = command("muse-cache", *VERBS[verb], MUSE_JIT_CACHE_DIR=cache.root, **ascii_only)
    assert code in (0, 1)
    assert err == ""
    assert out
    assert out.isascii()


def test_on_an_ascii_terminal_the_mark_of_a_cut_is_ascii(cache):
    ascii_only = {"LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0"}
    code, text = on_terminal(["ls", "--cache-dir", cache.root], 60, **ascii_only)
    assert code == 0
    assert text.isascii()
    assert any(line.endswith("~") for line in plain(text).splitlines())


def test_path_gives_the_bytes_of_a_folder_that_no_locale_can_write(tmp_path):
    code = "import os, sys; sys.argv[1:] = ['path', '--cache-dir', os.fsdecode(b'/caf\\xe9')]\n"
    code += "from cache_tools.cli import entry\nentry()"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, env=environment(PYTHONUTF8="1"))
    assert (done.returncode, done.stdout) == (0, b"/caf\xe9\n")
