"""The identity of the compiler and the FFI, by content, without importing either.

What is in, and why:

    each nvidia-cutlass-dsl* distribution in use   version, and a digest over the hashes its RECORD gives for its
        (meta, libs-base, libs-core, libs-cu<N>)   Python files: they trace the kernel and build the pass pipeline
    libcute_dsl_runtime.so of the CUDA flavour     its RECORD hash: every object links against it
    tvm_ffi                                        "major.minor" and a digest of the declarations that cross the
                                                   boundary (TVMFFIAny, TVMFFIObject, the call type, DLPack's structs)

What is out, and why:

    _cutlass_ir*                  the compiler module differs from one CPython version to the next, and so does the
                                  generated file with its hash; objects do not, and 3.11 and 3.12 must share a cache
    other binaries of the wheels  static libraries and iket extensions are rebuilt per wheel; no object contains them
    the CUDA flavour not in use   installing [cu13] brings both; the one not used compiles nothing
    tvm_ffi's patch version       an object linked under 0.1.15 loads and runs under 0.1.11
    Python, torch, cuda-bindings  none of them reaches the generated code
    paths, mtimes                 a reinstall of equal content must hit

Where no compiler is installed the identity is taken from what the cache recorded when it was filled
(`toolchain.json`).
"""

import dataclasses
import hashlib
import os
import re
from collections.abc import Sequence
from typing import Any

from muse_jit.errors import ToolchainError
from muse_jit.key.encoding import key_digest
from muse_jit.key.installed import Distribution, distributions
from muse_jit.key.memo import Memo

RUNTIME_LIBRARY = "libcute_dsl_runtime.so"
_FLAVOUR = re.compile(r"nvidia-cutlass-dsl-libs-cu(\d+)")
_COMPILER = ("nvidia-cutlass-dsl", "nvidia-cutlass-dsl-libs-base")
_INSTALL = "install nvidia-cutlass-dsl[cu13] and apache-tvm-ffi"


@dataclasses.dataclass(frozen=True)
class Toolchain:
    """The compiler and FFI of a target. Only `parts` is identity; the rest says where it came from."""

    cuda: int
    host: str
    parts: dict[str, Any]
    """What enters the key: distribution name to version and digests, and "tvm_ffi_abi"."""
    origin: str
    """ "installed", or "toolchain.json" where no compiler is installed."""
    modified: tuple[str, ...] = ()
    """With check="bytes": files whose installed bytes are not what RECORD says."""

    @property
    def digest(self) -> str:
        """Digest of `parts`, for tables and file names."""
        return key_digest(self.parts)

    def record(self, created: float) -> dict[str, Any]:
        """What `toolchain.json` keeps of this toolchain."""
        return {
            "digest": self.digest,
            "cuda": self.cuda,
            "host": self.host,
            "parts": self.parts,
            "recorded": created,
        }


def installed_cuda_majors(path: list[str] | None = None) -> tuple[int, ...]:
    """CUDA major versions for which a complete compiler is installed, newest first."""
    found = distributions(("nvidia-cutlass-dsl",), path)
    if not all(name in found for name in _COMPILER):
        return ()
    return tuple(sorted((int(m[1]) for name in found if (m := _FLAVOUR.fullmatch(name))), reverse=True))


def identify(
    cuda: int | None,
    host: str,
    *,
    check: str = "record",
    recorded: Sequence[dict[str, Any]] = (),
    path: list[str] | None = None,
    memo: Memo | None = None,
) -> Toolchain:
    """The toolchain for a CUDA major version (None: the newest installed) and a host architecture.

    `recorded` are the records of the cache's `toolchain.json`, used only where no compiler is installed; the newest
    one that fits wins. `path` stands in for `sys.path`; `memo` knows what RECORDs came to before, by their content.

    Raises:
        ToolchainError: nothing identifies a toolchain, with what to install.
    """
    found = distributions(("nvidia-cutlass-dsl", "apache-tvm-ffi"), path)
    majors = installed_cuda_majors(path)
    if not majors:
        return _from_records(cuda, host, recorded, found, memo)
    if cuda is None:
        cuda = majors[0]
    if cuda not in majors:
        have = ", ".join(f"CUDA {m}" for m in majors)
        raise ToolchainError(f"no compiler for CUDA {cuda} is installed (installed: {have}); {_INSTALL}")
    if "apache-tvm-ffi" not in found:
        raise ToolchainError(f"apache-tvm-ffi is not installed, which compiled kernels are called through; {_INSTALL}")
    flavour = f"nvidia-cutlass-dsl-libs-cu{cuda}"
    parts: dict[str, Any] = {}
    modified: list[str] = []
    for name in sorted(found):
        if name == flavour or (name.startswith("nvidia-cutlass-dsl") and not re.search(r"-cu\d+$", name)):
            parts[name] = _identity(found[name], cuda, check, modified, memo if memo is not None else Memo())
    if "runtime" not in parts[flavour]:
        raise ToolchainError(f"{flavour} {found[flavour].version} has no {RUNTIME_LIBRARY}; reinstall it")
    parts["tvm_ffi_abi"] = tvm_ffi_abi(found["apache-tvm-ffi"], memo)
    return Toolchain(cuda, host, parts, "installed", tuple(modified))


def runtime_library(cuda: int, override: str | None = None, path: list[str] | None = None) -> str:
    """Path of the runtime library that kernels of a CUDA major version need at load time.

    Raises:
        ToolchainError: it is not on this machine, with what to install or set.
    """
    name = f"nvidia-cutlass-dsl-libs-cu{cuda}"
    if override is not None:
        if os.path.isfile(override):
            return override
        raise ToolchainError(f"MUSE_JIT_RUNTIME_LIB is {override}, which is not a file")
    dist = distributions((name,), path).get(name)
    if dist is not None:
        candidate = dist.path(f"nvidia_cutlass_dsl/cu{cuda}/lib/{RUNTIME_LIBRARY}")
        if os.path.isfile(candidate):
            return candidate
    raise ToolchainError(
        f"{RUNTIME_LIBRARY} for CUDA {cuda} was not found; install {name}, or set MUSE_JIT_RUNTIME_LIB to its path"
    )


def tvm_ffi_abi(dist: Distribution, memo: Memo | None = None) -> str:
    """The part of tvm_ffi's C ABI that compiled kernels rely on, as "major.minor/digest".

    `memo` knows what headers came to before, by their content.

    Raises:
        ToolchainError: the distribution lacks its C headers.
    """
    try:
        with open(dist.path("tvm_ffi/include/tvm/ffi/c_api.h"), "rb") as file:
            api = file.read()
        with open(dist.path("tvm_ffi/include/dlpack/dlpack.h"), "rb") as file:
            dlpack = file.read()
    except OSError as error:
        raise ToolchainError(f"apache-tvm-ffi {dist.version} has no C header {error.filename}; reinstall it") from None
    known = memo if memo is not None else Memo()
    abi: str = known.get("tvm_ffi abi", api + b"\0" + dlpack, lambda: _read_abi(dist, api, dlpack))
    return abi


def _read_abi(dist: Distribution, api_header: bytes, dlpack_header: bytes) -> str:
    api, dlpack = (_without_comments(h.decode("utf-8", "replace")) for h in (api_header, dlpack_header))
    version = [re.search(rf"#define TVM_FFI_VERSION_{part} (\d+)", api) for part in ("MAJOR", "MINOR")]
    declarations = [_declaration(api, name) for name in ("TVMFFIAny", "TVMFFIObject")]
    declarations += [_declaration(dlpack, name) for name in ("DLDevice", "DLDataType", "DLTensor")]
    call = re.search(r"typedef int \(\*TVMFFISafeCallType\)[^;]*;", api)
    if None in version or None in declarations or call is None:
        raise ToolchainError(f"apache-tvm-ffi {dist.version} declares its C ABI in a form this version cannot read")
    text = "\n".join(" ".join(d.split()) for d in [*declarations, call[0]] if d is not None)
    major, minor = (match[1] for match in version if match is not None)
    return f"{major}.{minor}/{hashlib.sha256(text.encode()).hexdigest()[:16]}"


def _identity(dist: Distribution, cuda: int, check: str, modified: list[str], memo: Memo) -> dict[str, str]:
    """Version and digests of one distribution; appends to `modified` what differs from RECORD when asked to look."""
    record = dist.record()
    if record is None or check == "bytes":
        return _read_identity(dist, cuda, check, modified)
    identity = memo.get(f"record cu{cuda}", record, lambda: _read_identity(dist, cuda, check, modified, record))
    return {**identity, "version": dist.version}


def _read_identity(
    dist: Distribution, cuda: int, check: str, modified: list[str], record: bytes | None = None
) -> dict[str, str]:
    runtime = f"nvidia_cutlass_dsl/cu{cuda}/lib/{RUNTIME_LIBRARY}"  # the wheel has link stubs of this name elsewhere
    recorded = dist.recorded_hashes(record)
    names = recorded if recorded is not None else _walk(dist)
    counting = sorted(name for name in names if name == runtime or _is_source(name))
    hashes = recorded or {}
    if recorded is None or check == "bytes":
        hashes = dist.installed_hashes(counting)
        modified += [f"{dist.name}: {n}" for n in counting if recorded is not None and hashes.get(n) != recorded[n]]
    lines = [f"{name} {hashes.get(name)}" for name in counting if name != runtime]
    identity = {"version": dist.version, "python": hashlib.sha256("\n".join(lines).encode()).hexdigest()}
    if hashes.get(runtime):
        identity["runtime"] = hashes[runtime]
    return identity


def _is_source(name: str) -> bool:
    file = name.rsplit("/", 1)[-1]
    return file.endswith(".py") and not file.startswith("_cutlass_ir")


def _walk(dist: Distribution) -> list[str]:
    """Files of a distribution that has no RECORD: everything below the folder all of them install into.

    Which of them are its own cannot be told, so such an installation has an identity of its own kind.
    """
    result = []
    for folder, _, names in os.walk(dist.path("nvidia_cutlass_dsl")):
        result += [os.path.relpath(os.path.join(folder, name), dist.root) for name in names]
    return sorted(result)


def _without_comments(text: str) -> str:
    return re.sub(r"//[^\n]*", "", re.sub(r"/\*.*?\*/", "", text, flags=re.DOTALL))


def _declaration(text: str, name: str) -> str | None:
    """The text of `typedef struct {...} name;`, searched from its end so that nested braces need no parser."""
    end = re.search(rf"\}}\s*{name}\s*;", text)
    if end is None:
        return None
    start = text.rfind("typedef struct", 0, end.start())
    return text[start : end.end()] if start >= 0 else None


def _from_records(
    cuda: int | None, host: str, recorded: Sequence[dict[str, Any]], found: dict[str, Distribution], memo: Memo | None
) -> Toolchain:
    abi = tvm_ffi_abi(found["apache-tvm-ffi"], memo) if "apache-tvm-ffi" in found else None
    fitting = [
        r
        for r in recorded
        if r["host"] == host and cuda in (None, r["cuda"]) and abi in (None, r["parts"].get("tvm_ffi_abi"))
    ]
    fitting = [r for r in fitting if _of_this_runtime(r, found)]
    if not fitting:
        wanted = f"CUDA {cuda}, {host}" if cuda else host
        raise ToolchainError(
            f"no compiler is installed, and the cache's toolchain.json has none for {wanted}"
            f"{f' and tvm_ffi ABI {abi}' if abi else ''}; {_INSTALL}, or use a cache filled for this machine"
        )
    newest = max(fitting, key=lambda r: r["recorded"])
    return Toolchain(newest["cuda"], host, newest["parts"], "toolchain.json")


def _of_this_runtime(record: dict[str, Any], found: dict[str, Distribution]) -> bool:
    """Whether the runtime library of this machine is the one that the recorded kernels were linked against.

    Nothing to compare (MUSE_JIT_RUNTIME_LIB names a file that no distribution brought) is no objection.
    """
    name = f"nvidia-cutlass-dsl-libs-cu{record['cuda']}"
    linked = record["parts"].get(name)
    hashes = (found[name].recorded_hashes() if name in found else None) or {}
    here = hashes.get(f"nvidia_cutlass_dsl/cu{record['cuda']}/lib/{RUNTIME_LIBRARY}")
    return here is None or not isinstance(linked, dict) or linked.get("runtime") in (None, here)
