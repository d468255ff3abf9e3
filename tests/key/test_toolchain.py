import csv
import json
import os
import pathlib
import shutil
import sys

import pytest
from support.process import run

from muse_jit.errors import ToolchainError
from muse_jit.key.installed import distributions, file_hash
from muse_jit.key.toolchain import identify, installed_cuda_majors, runtime_library

FLAVOURS = (12, 13)
API = """// comment
#define TVM_FFI_VERSION_MAJOR 0
#define TVM_FFI_VERSION_MINOR 1
#define TVM_FFI_VERSION_PATCH {patch}
typedef struct {{ int32_t type_index; }} TVMFFIAny;  /* {note} */
typedef struct {{ uint64_t count; union {{ void* a; int64_t b; }}; }} TVMFFIObject;
typedef int (*TVMFFISafeCallType)(void* handle, const TVMFFIAny* args, int32_t num_args, TVMFFIAny* result);
"""
DLPACK = """typedef struct { int type; } DLDevice;
typedef struct { int code; } DLDataType;
typedef struct { void* data; } DLTensor;
"""


def _distribution(site, name, version, files, record=True):
    """Lay out an installed distribution; `files` maps relative path to text."""
    info = site / f"{name.replace('-', '_')}-{version}.dist-info"
    info.mkdir(parents=True)
    for relative, text in files.items():
        (site / relative).parent.mkdir(parents=True, exist_ok=True)
        (site / relative).write_text(text)
    if record:
        with open(info / "RECORD", "w") as file:
            csv.writer(file, lineterminator="\n").writerows(
                [(r, file_hash(str(site / r)), len(t)) for r, t in files.items()] + [(f"{info.name}/RECORD", "", "")]
            )


def _site(folder, *, python="3.11", patch=15, note="", change=None, flavours=FLAVOURS, record=True, version="4.8.1"):
    """A site-packages with a small toolchain; `change` maps a path to other text."""
    base = "nvidia_cutlass_dsl/dsl_packages/cutlass"
    tag = python.replace(".", "")
    change = change or {}

    def put(name, files):
        files = {r: change.get(r, text) for r, text in files.items()}
        _distribution(folder, name, version, files, record)

    put("nvidia-cutlass-dsl", {})
    put(
        "nvidia-cutlass-dsl-libs-base",
        {f"{base}/_mlir/ir.py": "ir", f"{base}/_core.cpython-{tag}.so": f"binary {python}"},
    )
    put("nvidia-cutlass-dsl-libs-core", {f"{base}/cute/core.py": "core", f"{base}/py.typed": ""})
    for cuda in flavours:
        lib = f"nvidia_cutlass_dsl/cu{cuda}/lib"
        put(
            f"nvidia-cutlass-dsl-libs-cu{cuda}",
            {
                f"{lib}/libcute_dsl_runtime.so": f"runtime {cuda}",
                f"{lib}/libcuda_dialect_runtime_static.a": f"static {python}",
                f"{lib}/stubs/aarch64/libcute_dsl_runtime.so": "stub",
                f"{base}/_mlir/_mlir_libs/_cutlass_ir.cu{cuda}.cpython-{tag}.so": f"compiler {python}",
                f"{base}/_mlir/_mlir_libs/_cutlass_ir_version_cu{cuda}.py": f"hash {python}",
            },
        )
    _distribution(
        folder,
        "apache-tvm-ffi",
        f"0.1.{patch}",
        {
            "tvm_ffi/include/tvm/ffi/c_api.h": API.format(patch=patch, note=note),
            "tvm_ffi/include/dlpack/dlpack.h": change.get("dlpack", DLPACK),
        },
    )
    return [str(folder)]


def _digest(path, cuda=13, **options):
    return identify(cuda, "x86_64", path=path, **options).digest


@pytest.fixture
def reference(tmp_path):
    return _digest(_site(tmp_path / "reference"))


def test_python_version_patch_version_static_libraries_and_place_do_not_count(tmp_path, reference):
    assert _digest(_site(tmp_path / "elsewhere" / "b", python="3.12", patch=11, note="other comment")) == reference


def test_an_unused_flavour_does_not_count(tmp_path, reference):
    assert _digest(_site(tmp_path / "b", flavours=(13,))) == reference
    assert _digest(_site(tmp_path / "c"), cuda=12) != reference


@pytest.mark.parametrize(
    "path",
    [
        "nvidia_cutlass_dsl/dsl_packages/cutlass/_mlir/ir.py",
        "nvidia_cutlass_dsl/dsl_packages/cutlass/cute/core.py",
        "nvidia_cutlass_dsl/cu13/lib/libcute_dsl_runtime.so",
        "dlpack",
    ],
)
def test_each_part_counts(tmp_path, reference, path):
    other = "typedef struct { int type; int id; } DLDevice;" + DLPACK.split(";", 2)[2] if path == "dlpack" else "edited"
    assert _digest(_site(tmp_path / "b", change={path: other})) != reference


def test_the_version_counts(tmp_path, reference):
    assert _digest(_site(tmp_path / "b", version="4.8.0")) != reference


def test_without_record_the_bytes_count_and_modification_times_do_not(tmp_path):
    path = _site(tmp_path / "b", record=False)
    digest = _digest(path)
    assert identify(13, "x86_64", path=path).parts["nvidia-cutlass-dsl-libs-cu13"]["runtime"] == file_hash(
        str(tmp_path / "b/nvidia_cutlass_dsl/cu13/lib/libcute_dsl_runtime.so")
    )
    for file in pathlib.Path(path[0]).rglob("*"):
        os.utime(file, (0, 0))
    assert _digest(path) == digest == _digest(_site(tmp_path / "c", record=False))
    (tmp_path / "b/nvidia_cutlass_dsl/dsl_packages/cutlass/cute/core.py").write_text("CORE")
    assert _digest(path) != digest


def test_checking_bytes_names_the_file_that_differs_from_record(tmp_path, reference):
    path = _site(tmp_path / "b")
    assert identify(13, "x86_64", path=path, check="bytes").modified == ()
    assert _digest(path, check="bytes") == reference
    (tmp_path / "b/nvidia_cutlass_dsl/dsl_packages/cutlass/cute/core.py").write_text("patched in place")
    assert _digest(path) == reference
    checked = identify(13, "x86_64", path=path, check="bytes")
    assert checked.modified == ("nvidia-cutlass-dsl-libs-core: nvidia_cutlass_dsl/dsl_packages/cutlass/cute/core.py",)
    assert checked.digest != reference


def test_newest_flavour_is_the_default_and_a_missing_one_is_named(tmp_path):
    path = _site(tmp_path / "b")
    assert installed_cuda_majors(path) == (13, 12)
    assert identify(None, "x86_64", path=path).cuda == 13
    path = _site(tmp_path / "c", flavours=(12,))
    with pytest.raises(ToolchainError, match=r"no compiler for CUDA 13 is installed \(installed: CUDA 12\)"):
        identify(13, "x86_64", path=path)


def test_without_a_compiler_the_newest_fitting_record_of_the_cache_counts(tmp_path):
    full = identify(13, "x86_64", path=_site(tmp_path / "builder"))
    serving = _site(tmp_path / "serving")
    for info in (tmp_path / "serving").glob("nvidia_cutlass_dsl*"):
        shutil.rmtree(info)
    old = {**full.record(1.0), "parts": {"tvm_ffi_abi": full.parts["tvm_ffi_abi"], "older": "x"}}
    other_host = {**full.record(9.0), "host": "aarch64"}
    other_abi = {**full.record(9.0), "parts": {"tvm_ffi_abi": "0.2/ffff"}}
    records = json.loads(json.dumps([old, full.record(2.0), other_host, other_abi]))
    found = identify(None, "x86_64", recorded=records, path=serving)
    assert (found.digest, found.origin, found.cuda) == (full.digest, "toolchain.json", 13)
    with pytest.raises(ToolchainError, match=r"toolchain\.json has none for CUDA 12, x86_64 and tvm_ffi ABI 0\.1/"):
        identify(12, "x86_64", recorded=records, path=serving)
    with pytest.raises(ToolchainError, match="no compiler is installed"):
        identify(None, "x86_64", path=serving)


def test_runtime_library_from_the_flavour_or_the_setting(tmp_path):
    path = _site(tmp_path / "b")
    assert pathlib.Path(runtime_library(12, path=path)).read_text() == "runtime 12"
    other = tmp_path / "libcute_dsl_runtime.so"
    with pytest.raises(ToolchainError, match=r"MUSE_JIT_RUNTIME_LIB is .* not a file"):
        runtime_library(13, str(other), path=path)
    other.write_text("x")
    assert runtime_library(13, str(other), path=path) == str(other)
    with pytest.raises(ToolchainError, match=r"install nvidia-cutlass-dsl-libs-cu13, or set MUSE_JIT_RUNTIME_LIB"):
        runtime_library(13, path=[str(tmp_path / "empty")])


def test_the_installed_toolchain_is_identified_without_importing_it():
    out = run(
        "from muse_jit.key.toolchain import identify\n"
        "t = identify(None, 'x86_64')\n"
        "print(t.digest, t.cuda, sorted(t.parts))",
        block=("cutlass", "tvm_ffi", "torch"),
    )
    here = identify(None, "x86_64")
    assert out.split()[0] == here.digest
    assert set(here.parts) >= {"nvidia-cutlass-dsl-libs-base", f"nvidia-cutlass-dsl-libs-cu{here.cuda}", "tvm_ffi_abi"}


def test_names_are_normalised_and_the_first_on_the_path_wins(tmp_path):
    _distribution(tmp_path / "a", "Nvidia.Cutlass_DSL", "1.0", {})
    _distribution(tmp_path / "b", "nvidia-cutlass-dsl", "2.0", {})
    found = distributions(
        ("nvidia-cutlass-dsl",), [str(tmp_path / "missing"), str(tmp_path / "a"), str(tmp_path / "b")]
    )
    assert found["nvidia-cutlass-dsl"].version == "1.0"
    assert sys.path  # `path` replaced it for this look-up only
