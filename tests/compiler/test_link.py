import pytest

from muse_jit.compiler import link as link_module
from muse_jit.compiler.link import find_linker
from muse_jit.errors import LinkerMissing


@pytest.fixture
def found(monkeypatch):
    """Only these commands are on the PATH."""
    names = set()
    monkeypatch.setattr(link_module.shutil, "which", lambda name: name if name in names else None)
    monkeypatch.setattr(link_module.importlib.util, "find_spec", lambda name: None)
    return names


def test_the_order_of_linkers(found, monkeypatch):
    with pytest.raises(LinkerMissing, match=r"none of \$CC, cc, gcc, clang"):
        find_linker("mine")
    monkeypatch.setattr(link_module.importlib.util, "find_spec", lambda name: name == "ziglang")
    assert find_linker(None)[1:] == ["-m", "ziglang", "cc"]
    for name in ("clang", "gcc", "cc"):
        found.add(name)
        assert find_linker(None) == [name]
    found.add("ccache")
    assert find_linker("ccache gcc -m64") == ["ccache", "gcc", "-m64"]
