import concurrent.futures
import gc
import os
import subprocess
import textwrap
import time

import pytest
from support.process import run

from muse_jit.errors import UsageError
from muse_jit.key.source import source_of

KERNEL = '''
"""A kernel."""
import json
import torch
import cutlass
from . import helper
from .deep.inner import thing
from muse_jit.constants import base
try:
    import optional_extra
except ImportError:
    optional_extra = None

WIDTH = 8  # lanes

def build(constants, target):
    """Build it."""
    return helper.scale(WIDTH)
'''
HELPER = "def scale(n):\n    return f'{n:>4}', 2 * n\n"


def _package(folder, kernel=KERNEL, helper=HELPER, inner="thing = 1\n", init=""):
    package = folder / "kernels_of_mine"
    (package / "deep").mkdir(parents=True)  # a nested namespace package: no __init__.py
    for name, text in (("__init__", init), ("kernel", kernel), ("helper", helper), ("deep/inner", inner)):
        (package / f"{name}.py").write_text(textwrap.dedent(text))
    import muse_jit

    return [str(folder), os.path.dirname(os.path.dirname(muse_jit.__file__))]


def _source(path):
    return source_of("kernels_of_mine.kernel:build", path)


def test_the_closure_is_found_without_importing(tmp_path):
    source = _source(_package(tmp_path))
    assert {m for m in source.modules if m.startswith("kernels")} == {
        "kernels_of_mine",
        "kernels_of_mine.kernel",
        "kernels_of_mine.helper",
        "kernels_of_mine.deep",
        "kernels_of_mine.deep.inner",
    }
    assert {"muse_jit.constants.base", "muse_jit.errors", "optional_extra"} <= set(source.modules)
    assert {"torch", "cutlass", "json"} <= source.outside


@pytest.mark.parametrize(
    "change",
    [
        {"kernel": KERNEL.replace("# lanes", "# a longer comment about lanes")},
        {"kernel": KERNEL.replace('"""Build it."""', '"""Build it, says another docstring."""')},
        {"kernel": KERNEL.replace('"""A kernel."""', "")},
        {"kernel": KERNEL.replace("WIDTH = 8", "\n\n\nWIDTH   =   8")},
        {"helper": "# comment\n" + HELPER},
        {"init": '"""Now documented."""\n'},
    ],
)
def test_comments_docstrings_and_formatting_do_not_count(tmp_path, change):
    assert _source(_package(tmp_path / "b", **change)).digest == _source(_package(tmp_path / "a")).digest


@pytest.mark.parametrize(
    "change",
    [
        {"kernel": KERNEL.replace("WIDTH = 8", "WIDTH = 9")},
        {"kernel": KERNEL.replace("WIDTH = 8", "WIDTH = 8.0")},
        {"kernel": KERNEL.replace("WIDTH = 8", "WIDTH = True")},
        {"kernel": KERNEL + "\nEXTRA = 'not a docstring'\n"},
        {"helper": HELPER.replace("2 * n", "n * 2")},
        {"helper": HELPER.replace(">4", ">5")},
        {"inner": "thing = 2\n"},
        {"init": "LEVEL = 1\n"},
    ],
)
def test_everything_else_counts_also_in_helpers(tmp_path, change):
    assert _source(_package(tmp_path / "b", **change)).digest != _source(_package(tmp_path / "a")).digest


def test_a_string_that_is_no_docstring_counts(tmp_path):
    before = _source(_package(tmp_path / "a", helper="def scale(n):\n    x = ('a'\n         'b')\n    return x\n"))
    after = _source(_package(tmp_path / "b", helper="def scale(n):\n    x = ('a'\n         'c')\n    return x\n"))
    assert before.digest != after.digest


def test_an_edit_of_equal_size_and_time_counts(tmp_path):
    path = _package(tmp_path)
    before = _source(path).digest
    file = tmp_path / "kernels_of_mine/helper.py"
    stat = file.stat()
    file.write_text(HELPER.replace("2 * n", "3 * n"))
    os.utime(file, ns=(stat.st_atime_ns, stat.st_mtime_ns))
    assert file.stat().st_size == stat.st_size
    assert _source(path).digest != before


def test_an_optional_dependency_counts_when_it_appears(tmp_path):
    path = _package(tmp_path)
    before = _source(path).digest
    (tmp_path / "optional_extra.py").write_text("x = 1\n")
    assert _source(path).digest != before


def test_another_distribution_counts_by_its_record(tmp_path):
    path = _package(tmp_path)
    before = _source(path).digest
    info = tmp_path / "optional_extra-1.0.dist-info"
    info.mkdir()
    (tmp_path / "optional_extra.py").write_text("x = 1\n")
    (info / "RECORD").write_text("optional_extra.py,sha256=one,6\noptional_extra-1.0.dist-info/RECORD,,\n")
    first = _source(path).digest
    (tmp_path / "optional_extra.py").write_text("x = 2\n")
    assert _source(path).digest == first != before
    (info / "RECORD").write_text("optional_extra.py,sha256=two,6\noptional_extra-1.0.dist-info/RECORD,,\n")
    assert _source(path).digest != first


@pytest.mark.parametrize(
    ("build", "message"),
    [
        ("kernels_of_mine.kernel", "module:function"),
        ("kernels_of_mine.kernel:", "module:function"),
        (":build", "module:function"),
        ("kernels_of_mine.absent:build", "was not found"),
        ("nowhere:build", "was not found"),
    ],
)
def test_what_cannot_be_found_is_named(tmp_path, build, message):
    with pytest.raises(UsageError, match=message):
        source_of(build, _package(tmp_path))


def test_a_syntax_error_names_file_and_line(tmp_path):
    with pytest.raises(UsageError, match=r"helper\.py, line 2"):
        _source(_package(tmp_path, helper="x = 1\ndef broken(:\n"))


def test_the_digest_does_not_change_when_the_kernel_was_imported():
    code = (
        "from muse_jit.key.source import source_of\n"
        "before = source_of('support.toy:build').digest\n"
        "import support.toy\n"
        "assert source_of('support.toy:build').digest == before\n"
        "print(before)"
    )
    assert run(code).strip() == source_of("support.toy:build").digest


@pytest.mark.parametrize("python", ["python3.12", "python3.13", "python3.14"])
def test_the_digest_is_the_same_under_another_python(python):
    import muse_jit

    package = os.path.dirname(os.path.dirname(muse_jit.__file__))
    code = (
        f"import sys; sys.path.insert(0, {package!r})\nfrom muse_jit.key.source import source_of\n"
        "print(*(source_of(f'muse_jit.kernels.{name}:build').digest for name in ('row_norm', 'dual_norm')))"
    )
    try:
        done = subprocess.run([python, "-c", code], capture_output=True, text=True, timeout=60)
    except FileNotFoundError:
        pytest.skip(f"no {python} here")
    if done.returncode:
        pytest.skip(f"{python} does not run here: {done.stderr.strip().splitlines()[-1:]}")
    names = ("muse_jit.kernels.row_norm:build", "muse_jit.kernels.dual_norm:build")
    assert done.stdout.split() == [source_of(name).digest for name in names]


def test_the_digest_is_the_same_from_another_folder(tmp_path):
    code = "import os; os.chdir('/')\nfrom muse_jit.key.source import source_of\n"
    out = run(code + "print(source_of('support.toy:build').digest)", PYTHONHASHSEED=3)
    assert out.strip() == source_of("support.toy:build").digest


def test_many_threads_at_once():
    """CPython 3.11 raises SystemError where a finalizer lets another thread parse in the middle of a parse."""

    class Slow:
        def __init__(self):
            self.me = self

        def __del__(self):
            time.sleep(0.0005)

    def ask(build):
        Slow()
        return source_of(build)

    build = "muse_jit.kernels.row_norm:build"
    expected = source_of(build)
    thresholds = gc.get_threshold()
    gc.set_threshold(50)
    try:
        with concurrent.futures.ThreadPoolExecutor(8) as pool:
            found = list(pool.map(ask, [build] * 24))
    finally:
        gc.set_threshold(*thresholds)
    assert found == [expected] * 24
