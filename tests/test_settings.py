import dataclasses
import inspect

import pytest

from muse_jit import settings as module
from muse_jit.errors import UsageError
from muse_jit.settings import Settings


@pytest.mark.parametrize("value", ["", " ", "\t"])
def test_unset_empty_and_blank_mean_the_default(value):
    environ = {variable: value for variable, _ in module._VARIABLES.values()}
    assert Settings.from_environ(environ) == Settings.from_environ({}) == Settings()


@pytest.mark.parametrize(
    ("variable", "value"),
    [
        ("MUSE_JIT_CACHE_DIR", "relative/path"),
        ("MUSE_JIT_CACHE_DIR", "/a:/b"),
        ("VLLM_CACHE_ROOT", ":/a"),
        ("MUSE_JIT_MODE", "readwrite"),
        ("MUSE_JIT_CUDA", "11"),
        ("MUSE_JIT_SHARE", "world"),
        ("MUSE_JIT_TOOLCHAIN_CHECK", "yes"),
        ("MUSE_JIT_COMPILE_OPTIONS", "LINEINFO"),
        ("MUSE_JIT_COMPILE_OPTIONS", "A=1,A=2"),
        ("MUSE_JIT_COMPILE_TIMEOUT", "-1"),
        ("MUSE_JIT_COMPILE_TIMEOUT", "soon"),
        ("MUSE_JIT_STALL_LIMIT", "inf"),
        ("MUSE_JIT_MAX_BYTES", "2 parsecs"),
        ("MUSE_JIT_MAX_BYTES", "-1"),
        ("MUSE_JIT_WORKERS", "0"),
        ("MUSE_JIT_WORKERS", "many"),
        ("MUSE_JIT_STRICT", "yes"),
    ],
)
def test_malformed_values_name_the_variable_and_the_value(variable, value):
    with pytest.raises(UsageError, match=variable) as caught:
        Settings.from_environ({variable: value})
    assert "\n" not in str(caught.value)


def test_values_and_their_origins():
    settings = Settings.from_environ({"MUSE_JIT_CUDA": "12", "MUSE_JIT_COMPILE_OPTIONS": "B=2, A=1"})
    settings = settings.with_options(cache_dir="/x", cuda=None)
    described = settings.describe()
    assert settings.compile_options == (("A", "1"), ("B", "2"))
    assert described["cuda"] == {"value": 12, "origin": "environment (MUSE_JIT_CUDA)", "variable": "MUSE_JIT_CUDA"}
    assert described["cache_dir"]["origin"] == "option"
    assert described["mode"]["origin"] == "default"


@pytest.mark.parametrize(
    ("text", "size"),
    [("0", 0), ("1234", 1234), ("12B", 12), ("5k", 5120), ("500M", 500 << 20), ("2G", 2 << 30), ("1.5 GiB", 3 << 29)],
)
def test_sizes(text, size):
    assert Settings.from_environ({"MUSE_JIT_MAX_BYTES": text}).max_bytes == size


def test_a_path_with_a_tilde_is_the_home_folder(monkeypatch):
    monkeypatch.setenv("HOME", "/home/of/somebody")
    assert Settings.from_environ({"MUSE_JIT_CACHE_DIR": "~/cache"}).cache_dir == "/home/of/somebody/cache"


def test_every_variable_is_documented_and_every_field_has_one():
    fields = {f.name for f in dataclasses.fields(Settings)} - {"origins"}
    assert set(module._VARIABLES) == fields
    for variable, _ in module._VARIABLES.values():
        assert variable in inspect.getdoc(module)
