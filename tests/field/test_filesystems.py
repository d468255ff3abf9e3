"""Kind J: limits of file systems, paths, environment, clock."""

import errno
import logging
import os
import pathlib
import time

import pytest
from support import toy
from support.entries import ARTIFACT, entry, key
from support.mounts import tmpfs
from support.process import run

from muse_jit.errors import UsageError
from muse_jit.service import JitService
from muse_jit.settings import Settings
from muse_jit.store import lookup as lookup_module
from muse_jit.store import publish as publish_module
from muse_jit.store.layout import Layout
from muse_jit.store.lookup import Hit, Miss, Reason, find
from muse_jit.store.publish import publish

pytestmark = pytest.mark.processes


def _service(cache, **options):
    return JitService("sm_90a", Settings().with_options(cache_dir=str(cache), **options))


def test_j1_an_entry_takes_at_most_four_inodes(settings):
    service = _service(settings.cache_dir)
    service.obtain(toy.ToyConstants(value=1))
    entries = pathlib.Path(service.layout.entries)
    (shard,) = entries.iterdir()
    assert len(list(shard.rglob("*"))) == 3
    assert list(pathlib.Path(service.layout.root, "staging-v1").iterdir()) == []


@pytest.mark.parametrize("limit", ["size=28k,nr_inodes=200", "size=1m,nr_inodes=9"])
def test_j1_j2_a_full_file_system_costs_a_warning_and_recovers(tmp_path, caplog, limit):
    with tmpfs(tmp_path / "small", f"{limit},mode=0700") as mount:
        cache = mount / "cache"
        Layout(str(cache)).create()
        service = _service(cache)
        with caplog.at_level(logging.WARNING, "muse_jit"):
            assert service.get(toy.ToyConstants(value=6))() == 6
        assert service.counters.not_stored == 1
        assert "No space left on device" in caplog.text
        left = [p.name for p in cache.rglob("*") if p.is_file()]
        assert not {"kernel.so", "entry.json"} & set(left)
        import subprocess

        subprocess.run(["mount", "-o", "remount,size=4m,nr_inodes=500", str(mount)], check=True)
        again = _service(cache)
        assert again.get(toy.ToyConstants(value=6))() == 6
        assert again.counters.not_stored == 0
        assert isinstance(_service(cache).find(toy.ToyConstants(value=6)), Hit)


def test_j3_a_cache_mounted_noexec_works(tmp_path):
    with tmpfs(tmp_path / "noexec", "noexec,size=1m,mode=0700") as mount:
        assert _service(mount / "cache").get(toy.ToyConstants(value=14))() == 14
        again = _service(mount / "cache", mode="forbid")
        assert again.get(toy.ToyConstants(value=14))() == 14


def test_j4_names_stay_short_for_a_long_kernel_name(tmp_path):
    layout = Layout(str(tmp_path / "cache"))
    long = key(kernel="a_very_long_kernel_name_" * 40)
    publish(layout, entry(long), ARTIFACT)
    assert isinstance(find(layout, long), Hit)
    assert max(len(p.name.encode()) for p in pathlib.Path(layout.root).rglob("*")) <= 140


@pytest.mark.parametrize(
    "name", ["with space", "quo'te\"s", "ünïcode ☃", "per%scent", "-dash", "semi;colon && true", "$HOME"]
)
def test_j5_paths_of_every_sort(tmp_path, name):
    service = _service(tmp_path / name / "cache")
    assert service.get(toy.ToyConstants(value=3))() == 3
    again = _service(tmp_path / name / "cache", mode="forbid")
    assert again.get(toy.ToyConstants(value=3))() == 3


def test_j5_a_kernel_whose_source_lies_below_a_strange_path(tmp_path):
    folder = tmp_path / "my 'kernels' %d"
    folder.mkdir()
    source = (
        pathlib.Path(toy.__file__).read_text().replace('"toy"', '"strange"').replace("support.toy", "strange_kernel")
    )
    (folder / "strange_kernel.py").write_text(source)
    out = run(
        f"sys.path.insert(0, {str(folder)!r})\n"
        "import muse_jit, strange_kernel\nfrom muse_jit.settings import Settings\n"
        f"s = muse_jit.JitService('sm_90a', Settings().with_options(cache_dir={str(tmp_path / 'cache')!r}))\n"
        "print(s.get(strange_kernel.ToyConstants(value=19))())",
        block=("cutlass", "torch"),
    )
    assert out.strip() == "19"


def test_j6_the_folder_through_a_link_that_is_turned_later(tmp_path):
    first, second, link = tmp_path / "first", tmp_path / "second", tmp_path / "link"
    first.mkdir(mode=0o700)
    second.mkdir(mode=0o700)
    link.symlink_to(first)
    service = _service(link)
    assert service.get(toy.ToyConstants(value=1))() == 1
    link.unlink()
    link.symlink_to(second)
    assert service.get(toy.ToyConstants(value=2))() == 2
    assert isinstance(_service(second).find(toy.ToyConstants(value=2)), Hit)
    assert isinstance(_service(first).find(toy.ToyConstants(value=1)), Hit)


def test_j7_staging_is_inside_the_cache_and_a_rename_suffices(tmp_path, monkeypatch):
    """The compile's own files are elsewhere, on another file system; what is renamed is not."""
    renames = []
    real = os.rename
    monkeypatch.setattr(publish_module.os, "rename", lambda a, b: (renames.append((a, b)), real(a, b))[1])
    with tmpfs(tmp_path / "cache", "size=1m,mode=0700") as mount:
        _service(mount).obtain(toy.ToyConstants())
        assert renames
        assert all(str(path).startswith(str(mount)) for pair in renames for path in pair)


@pytest.mark.parametrize("value", ["", "  "])
def test_j8_blank_variables_never_mean_the_current_folder(tmp_path, value):
    out = run(
        f"import os; os.chdir({str(tmp_path)!r})\n"
        "import muse_jit\nfrom muse_jit.settings import Settings\n"
        "print(muse_jit.JitService('sm_90a', Settings.from_environ()).layout.root)",
        MUSE_JIT_CACHE_DIR=value,
        VLLM_CACHE_ROOT=value,
        XDG_CACHE_HOME=tmp_path / "xdg",
    )
    assert out.strip() == str(tmp_path / "xdg" / "muse_jit")


@pytest.mark.parametrize(
    ("variable", "value"),
    [
        *(
            (v, text)
            for v in ("MUSE_JIT_CACHE_DIR", "VLLM_CACHE_ROOT", "MUSE_JIT_RUNTIME_LIB")
            for text in (":/a", "/a:/b")
        ),
        ("CC", ":/usr/bin/cc"),
    ],
)
def test_j9_a_list_in_a_variable_for_one_path_is_refused_by_name(variable, value):
    with pytest.raises(UsageError, match=f"^{variable} is '{value}'"):
        Settings.from_environ({variable: value})


@pytest.mark.parametrize("code", [errno.ESTALE, errno.EBUSY])
def test_j10_passing_errors_of_a_network_file_system_are_retried_then_a_miss(tmp_path, monkeypatch, code):
    layout = Layout(str(tmp_path / "cache"))
    publish(layout, entry(), ARTIFACT)
    failures = [OSError(code, os.strerror(code))] * 2
    real = lookup_module.os.fstat

    def fstat(descriptor):
        if failures:
            raise failures.pop()
        return real(descriptor)

    monkeypatch.setattr(lookup_module.os, "fstat", fstat)
    assert isinstance(find(layout, key()), Hit)
    failures += [OSError(code, os.strerror(code))] * 50
    miss = find(layout, key())
    failures.clear()
    assert isinstance(miss, Miss)
    assert miss.reason == Reason.UNREADABLE
    assert os.strerror(code) in miss.detail


@pytest.mark.parametrize("code", [errno.ESTALE, errno.EBUSY])
def test_j10_publishing_is_retried_too(tmp_path, monkeypatch, code):
    layout = Layout(str(tmp_path / "cache"))
    layout.create()
    failures = [OSError(code, os.strerror(code))] * 2
    real = os.rename

    def rename(a, b):
        if failures:
            raise failures.pop()
        real(a, b)

    monkeypatch.setattr(publish_module.os, "rename", rename)
    publish(layout, entry(), ARTIFACT)
    monkeypatch.undo()
    assert isinstance(find(layout, key()), Hit)


def test_a2_a_failed_clean_up_is_not_fatal(tmp_path, monkeypatch):
    layout = Layout(str(tmp_path / "cache"))
    layout.create()

    def busy(path, ignore_errors=False):
        if not ignore_errors:
            raise OSError(errno.EBUSY, "Device or resource busy")

    monkeypatch.setattr(publish_module.shutil, "rmtree", busy)
    assert publish(layout, entry(), ARTIFACT) == entry()


@pytest.mark.parametrize("stamp", [0, 4_000_000_000])
def test_j11_entries_with_impossible_stamps_are_hits(tmp_path, stamp):
    service = _service(tmp_path / "cache")
    service.obtain(toy.ToyConstants(value=5))
    for path in pathlib.Path(service.layout.root).rglob("*"):
        os.utime(path, (stamp, stamp))
    assert service.get(toy.ToyConstants(value=5))() == 5
    assert service.counters.compiled == 1


def test_j12_a_look_up_does_not_depend_on_the_number_of_entries(tmp_path):
    """It opens the entry's own path and lists nothing."""
    layout = Layout(str(tmp_path / "cache"))
    publish(layout, entry(), ARTIFACT)

    def forbidden(*arguments):
        raise AssertionError("a look-up lists no folder")

    with pytest.MonkeyPatch.context() as patch:
        for name in ("listdir", "scandir", "walk"):
            patch.setattr(os, name, forbidden)
        assert isinstance(find(layout, key()), Hit)


def test_j12_listing_many_entries(tmp_path):
    """Every folder is visited once, damaged or not."""
    import json

    from muse_jit.store.listing import listed

    layout = Layout(str(tmp_path / "cache"))
    publish(layout, entry(), ARTIFACT)
    document = json.loads(entry().to_json())
    count = 2000
    for number in range(count):
        digest = f"{number * 7919 % 65536:04x}{number:060x}"
        folder = pathlib.Path(layout.entries, digest[:2], digest)
        folder.mkdir(parents=True, mode=0o700)
        (folder / "entry.json").write_text(json.dumps({**document, "digest": digest}))
    started = time.monotonic()
    assert sum(1 for _ in listed(layout)) == count + 1
    assert time.monotonic() - started < 60  # a bound against a quadratic listing, not a benchmark
