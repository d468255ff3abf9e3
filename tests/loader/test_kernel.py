import os

import pytest
from support import toy
from support.entries import entry, key
from support.process import run

from muse_jit.errors import LoadError
from muse_jit.key.encoding import content_digest

pytestmark = pytest.mark.processes


@pytest.fixture(scope="module")
def library(tmp_path_factory):
    """Bytes of a library for `key()` that returns 11, and its manifest."""
    import subprocess

    folder = tmp_path_factory.mktemp("library")
    toy._Object(11).export_to_c(str(folder / "k.o"), function_name=key().symbol)
    subprocess.run(["cc", "-shared", "-nostdlib", "-o", folder / "k.so", folder / "k.o"], check=True)
    return (folder / "k.so").read_bytes()


def _runtime():
    from muse_jit.key.toolchain import identify, runtime_library

    return runtime_library(identify(None, "x86_64").cuda)


def _load(artifact, of=None):
    from muse_jit.loader.kernel import load

    return load(of or entry(artifact=artifact), artifact, _runtime())


def test_a_kernel_is_called_and_says_what_it_is(library):
    kernel = _load(library)
    assert kernel() == 11
    assert repr(kernel) == f"<Kernel toy {key().digest[:12]} sm_90a>"


def test_loading_twice_gives_two_kernels_that_both_work(library):
    first, second = _load(library), _load(library)
    assert first is not second
    assert (first(), second()) == (11, 11)


def test_the_bytes_given_are_the_bytes_loaded_also_under_an_equal_name(library, tmp_path):
    import subprocess

    toy._Object(12).export_to_c(str(tmp_path / "k.o"), function_name=key().symbol)
    subprocess.run(["cc", "-shared", "-nostdlib", "-o", tmp_path / "k.so", tmp_path / "k.o"], check=True)
    assert _load(library)() == 11
    assert _load((tmp_path / "k.so").read_bytes())() == 12
    assert _load(library)() == 11


@pytest.mark.parametrize("cut", [0, 10, 64, 500])
def test_bytes_that_are_no_library_are_a_load_error_in_one_line(library, cut):
    with pytest.raises(LoadError, match=r"^toy-[0-9a-f]{12} cannot be opened: ") as caught:
        _load(library[:cut])
    assert "\n" not in str(caught.value)
    assert "/tmp" not in str(caught.value)


def test_a_missing_symbol_is_named(library):
    with pytest.raises(LoadError, match=r"does not export .other_symbol."):
        _load(library, entry(artifact=library, symbol="other_symbol"))


def test_no_descriptor_and_no_file_is_left(library, tmp_path, monkeypatch):
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    _load(library)
    before = len(os.listdir("/proc/self/fd"))
    for _ in range(3):
        _load(library)
    assert len(os.listdir("/proc/self/fd")) == before
    assert list(tmp_path.iterdir()) == []


def _child(library, tmp_path, before=""):
    (tmp_path / "k.so").write_bytes(library)
    return run(
        f"{before}\n"
        "from muse_jit.loader.kernel import load\n"
        "from support.entries import entry\n"
        "from muse_jit.key.toolchain import identify, runtime_library\n"
        f"data = open({str(tmp_path / 'k.so')!r}, 'rb').read()\n"
        "runtime = runtime_library(identify(None, 'x86_64').cuda)\n"
        "print([load(entry(artifact=data), data, runtime)() for _ in range(2)])\n"
        "import os, tempfile\n",
        block=("cutlass",),
    ).strip()


def test_without_a_writable_folder_the_memory_file_is_opened_by_number(library, tmp_path):
    before = (
        "import tempfile\n"
        "def no(*a, **k): raise FileNotFoundError('no usable temporary directory')\n"
        "tempfile.mkdtemp = no"
    )
    assert _child(library, tmp_path, before) == "[11, 11]"


def test_links_are_gone_when_the_process_ends(library, tmp_path):
    folder = tmp_path / "links"
    folder.mkdir()
    assert _child(library, tmp_path, f"import tempfile; tempfile.tempdir = {str(folder)!r}") == "[11, 11]"
    assert list(folder.iterdir()) == []


def test_a_missing_runtime_library_is_named(library):
    from muse_jit.loader.kernel import load

    with pytest.raises(
        LoadError, match=r"cannot use /nowhere/lib\.so beside it|runtime library /nowhere/lib\.so cannot"
    ):
        load(entry(artifact=library), library, "/nowhere/lib.so")


def test_digest_of_the_loaded_bytes_is_that_of_the_manifest(library):
    assert entry(artifact=library).artifact_digest == content_digest(library)
