import os
import stat

import pytest
from support.entries import key
from support.process import run

from muse_jit.errors import CacheUnusable
from muse_jit.store.layout import Layout, default_root


def _mode(path):
    return stat.S_IMODE(os.stat(path).st_mode)


@pytest.mark.parametrize(
    ("cache_dir", "vllm", "expected"),
    [
        ("/explicit", "/vllm", ("/explicit", "cache_dir")),
        (None, "/vllm", ("/vllm/muse_jit", "VLLM_CACHE_ROOT")),
        ("", None, None),
    ],
)
def test_the_root_by_priority(cache_dir, vllm, expected, monkeypatch, tmp_path):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert default_root(cache_dir, vllm) == (expected or (str(tmp_path / "muse_jit"), "user cache folder"))


@pytest.mark.skipif(os.geteuid() != 0, reason="needs root to become another user")
def test_a_user_without_home_and_passwd_entry_gets_a_folder_of_its_own():
    code = (
        "import os; [os.environ.pop(n, None) for n in ('HOME', 'XDG_CACHE_HOME')]; import muse_jit.store.layout as l\n"
        "import platformdirs\n"
        "os.setuid(54321)\n"
        "print(*l.default_root(None, None), sep='|')"
    )
    assert run(code).strip() == "/var/tmp/muse_jit-54321|no home folder"


def test_the_folder_explains_itself(tmp_path):
    layout = Layout(str(tmp_path / "cache"))
    layout.create()
    assert "muse-cache ls" in (tmp_path / "cache/README").read_text()
    assert (tmp_path / "cache/CACHEDIR.TAG").read_text().startswith("Signature: 8a477f597d28d172789f06886806bc55\n")


@pytest.mark.parametrize(
    ("share", "folder", "file"), [("owner", 0o700, 0o600), ("group", 0o750, 0o640), ("all", 0o755, 0o644)]
)
@pytest.mark.parametrize("umask", [0o000, 0o077])
def test_modes_are_set_whatever_the_umask(tmp_path, share, folder, file, umask):
    old = os.umask(umask)
    try:
        layout = Layout(str(tmp_path / "cache"), share)
        layout.create()
        path = layout.lock(key().digest)
        layout.make_parents(path)
        layout.write_new(path, b"x")
    finally:
        os.umask(old)
    folders = [layout.root, os.path.dirname(path), os.path.dirname(os.path.dirname(path))]
    assert [_mode(f) for f in folders] == [folder] * 3
    assert _mode(path) == _mode(tmp_path / "cache/README") == file


def test_names_stay_short_whatever_a_kernel_is_called():
    layout = Layout("/cache")
    digest = key(kernel="x" * 500).digest
    for path in (
        layout.entry(digest),
        layout.lock(digest, "takeover.lock"),
        layout.unique("set-aside-v1", f"{digest}-"),
    ):
        assert len(os.path.basename(path)) <= 140


def test_unique_paths_are_unique_without_clock_or_random_state(monkeypatch):
    import random
    import time

    monkeypatch.setattr(time, "time", lambda: 0.0)
    seen = set()
    for _ in range(100):
        random.seed(1)
        seen.add(Layout("/cache").unique("staging-v1"))
    assert len(seen) == 100


def test_a_folder_others_can_write_to_is_refused_with_the_remedy(tmp_path):
    layout = Layout(str(tmp_path))
    tmp_path.chmod(0o777)
    with pytest.raises(CacheUnusable, match=rf"mode 0777\).*run: chmod go-w {tmp_path}"):
        layout.create()


@pytest.mark.skipif(os.geteuid() != 0, reason="needs root to give a folder away")
def test_a_folder_of_another_user_is_refused(tmp_path):
    os.chown(tmp_path, 54321, 54321)
    with pytest.raises(CacheUnusable, match="belongs to user id 54321"):
        Layout(str(tmp_path)).create()


def test_a_file_in_the_place_of_the_folder_is_refused(tmp_path):
    (tmp_path / "cache").write_text("x")
    with pytest.raises((CacheUnusable, FileExistsError)):
        Layout(str(tmp_path / "cache")).create()


def test_new_files_do_not_follow_links_or_overwrite(tmp_path):
    layout = Layout(str(tmp_path))
    (tmp_path / "target").write_text("untouched")
    (tmp_path / "link").symlink_to(tmp_path / "target")
    for name in ("link", "target"):
        with pytest.raises(FileExistsError):
            layout.write_new(str(tmp_path / name), b"x")
    assert (tmp_path / "target").read_text() == "untouched"
