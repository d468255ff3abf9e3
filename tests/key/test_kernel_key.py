import dataclasses
import json

import pytest

from muse_jit.constants.all_reduce_dual_norm import AllReduceDualNormConstants
from muse_jit.constants.dual_norm import DualNormConstants
from muse_jit.constants.row_norm import RowNormConstants
from muse_jit.constants.small_m_gemm import SmallMGemmConstants
from muse_jit.errors import UsageError
from muse_jit.kernels.registry import families
from muse_jit.key.difference import difference
from muse_jit.key.encoding import key_digest
from muse_jit.key.kernel_key import KernelKey
from muse_jit.key.options import ALLOWED, as_environment, check_options
from muse_jit.key.target import Target

TOOLCHAIN = {
    "nvidia-cutlass-dsl-libs-core": {"version": "4.8.1", "python": "aa"},
    "nvidia-cutlass-dsl-libs-cu13": {"version": "4.8.1", "python": "bb", "runtime": "sha256=cc"},
    "tvm_ffi_abi": "0.1/dd",
}
CONSTANTS = {
    "row_norm": RowNormConstants(hidden=8192, eps=1e-5, has_weight=True, gain_center=1.0, stream=True),
    "dual_norm": DualNormConstants(8192, 1e-8, "before", 1.0, next_eps=1e-5, next_gain_center=1.0),
    "all_reduce_dual_norm": AllReduceDualNormConstants(
        8192, 1e-8, "before", 1.0, next_eps=1e-5, next_gain_center=1.0, tp=4
    ),
    "small_m_gemm": SmallMGemmConstants(8192, 1024, 16, 64, 4, 1, 4, 1, 1),
}

# Another value for each field, possible beside the values above.
OTHER = {
    "row_norm": {
        "hidden": 4096,
        "eps": 1e-6,
        "has_weight": False,
        "weight_dtype": "fp32",
        "weight_before_norm": True,
        "gain_center": 0.0,
        "x_fp32": True,
        "out_dtype": "fp32",
        "stream": False,
        "aux": True,
        "enable_pdl": False,
        "release_early": True,
        "order": "triton-3.6",
    },
    "dual_norm": {
        "hidden": 4096,
        "post_eps": 1e-6,
        "post_weight": "after",
        "post_gain_center": 0.0,
        "gate": "scalar",
        "alpha_tensor": False,
        "alpha": 0.5,
        "next_eps": 1e-6,
        "next_has_weight": False,
        "next_weight_before": True,
        "next_gain_center": 0.0,
        "out_dtype": "fp32",
        "enable_pdl": False,
        "release_early": True,
        "order": "flashinfer-0.7",
        "ctas_per_row": 4,
    },
    "small_m_gemm": {
        "n": 4096,
        "k": 2048,
        "rows": 32,
        "tile_n": 32,
        "warps": 8,
        "m_tiles": 2,
        "copy_blocks": 2,
        "stages": 2,
        "x_depth": 2,
        "cluster_k": 2,
        "cluster_n": 2,
        "instruction": "wgmma",
        "enable_pdl": False,
        "release_early": True,
        "publish_tp": 8,
        "transport": "multicast",
        "capacity": 32,
    },
}
OTHER["all_reduce_dual_norm"] = {
    **OTHER["dual_norm"],
    "tp": 8,
    "sum_order": "node-local",
    "role": "consume",
    "transport": "multicast",
    "capacity": 32,
    "timeout_s": 1.0,
    "wait_last": True,
}
# What has to change along so that the set is possible at all.
ALONG = {
    ("row_norm", "has_weight"): {"gain_center": 0.0},
    ("dual_norm", "alpha"): {"alpha_tensor": False},
    ("dual_norm", "next_has_weight"): {"next_gain_center": 0.0},
    ("all_reduce_dual_norm", "alpha"): {"alpha_tensor": False},
    ("all_reduce_dual_norm", "next_has_weight"): {"next_gain_center": 0.0},
    ("all_reduce_dual_norm", "wait_last"): {"role": "consume"},
    ("small_m_gemm", "cluster_n"): {"instruction": "wgmma"},
    ("small_m_gemm", "transport"): {"publish_tp": 8},
    ("small_m_gemm", "capacity"): {"publish_tp": 8},
}
ONE_VALUE = {("all_reduce_dual_norm", "out_dtype")}
"""Fields of a base class that have one possible value here."""


def _key(**changes):
    values = {
        "kernel": "row_norm",
        "constants": CONSTANTS["row_norm"].as_dict(),
        "target": Target("sm_90a", 13, "x86_64"),
        "toolchain": TOOLCHAIN,
        "source": "ee",
        "build": "module:build",
        "options": {},
    }
    return KernelKey(**{**values, **changes})


# Golden digests. A change here means that every cache in the field is recompiled: say why in the commit.
GOLDEN = {
    "row norm": (_key(), "ff61f8275a8eb95f041af9576e4619d62a21f986d1f35da9ff4f21efffa8f7ef"),
    "other target": (
        _key(target=Target("sm_103a", 12, "aarch64")),
        "7893151c524919c596a6f4916560740331d6c13e73e2f0ec1da1dde8af8c01bc",
    ),
    "options": (_key(options={"LINEINFO": "1"}), "8ddcb827becb1dd47d796c3cfe1a07bbbaa58d4a7007ee4d4208926bdb2d8fbd"),
}


@pytest.mark.parametrize("name", GOLDEN)
def test_golden_digests(name):
    key, digest = GOLDEN[name]
    assert key.digest == digest


def _families():
    return [f.name for f in families() if f.build.startswith("muse_jit.")]


def test_every_family_of_the_package_is_perturbed_here():
    assert set(_families()) == set(CONSTANTS) == set(OTHER)


@pytest.mark.parametrize("family", CONSTANTS)
def test_every_field_changes_the_digest(family):
    base = CONSTANTS[family]
    seen = {_key(kernel=family, constants=base.as_dict()).digest}
    for field in dataclasses.fields(base):
        if (family, field.name) in ONE_VALUE:
            continue
        change = {field.name: OTHER[family][field.name], **ALONG.get((family, field.name), {})}
        digest = _key(kernel=family, constants=dataclasses.replace(base, **change).as_dict()).digest
        assert digest not in seen, field.name
        seen.add(digest)


@pytest.mark.parametrize(
    "change",
    [
        {"kernel": "row_norm2"},
        {"target": Target("sm_100a", 13, "x86_64")},
        {"target": Target("sm_90a", 12, "x86_64")},
        {"target": Target("sm_90a", 13, "aarch64")},
        {"toolchain": {**TOOLCHAIN, "tvm_ffi_abi": "0.2/dd"}},
        {"toolchain": {k: v for k, v in TOOLCHAIN.items() if k != "tvm_ffi_abi"}},
        {"source": "ef"},
        {"build": "module:rebuild"},
        {"options": {"LINEINFO": "1"}},
        {"options": {"LINEINFO": "0"}},
    ],
    ids=lambda change: "-".join(change),
)
def test_every_part_changes_the_digest_and_is_named_by_the_difference(change):
    old, new = _key(), _key(**change)
    assert new.digest != old.digest
    parts = [d.part.partition(".")[0] for d in difference(old.document, new.document)]
    assert parts == list(change)


def test_number_types_count_in_digest_and_difference():
    old = _key(constants={"x": 1})
    for value in (1.0, True, "1", None):
        new = _key(constants={"x": value})
        assert new.digest != old.digest
        assert str(difference(old.document, new.document)[0]) == f"constants.x: 1 -> {value!r}"


def test_the_document_survives_json():
    key = _key()
    assert key_digest(json.loads(json.dumps(key.document))) == key.digest


def test_the_symbol_is_an_identifier_that_tells_keys_apart():
    key = _key()
    assert key.symbol.isidentifier()
    assert key.symbol != _key(source="ef").symbol


def test_options_are_checked_by_name_and_reach_the_worker_as_variables():
    assert check_options((("DEBUG", "1"), ("LINEINFO", "1"))) == {"DEBUG": "1", "LINEINFO": "1"}
    assert as_environment({"LINEINFO": "1"}) == {"CUTE_DSL_LINEINFO": "1"}
    with pytest.raises(UsageError, match="compile option 'ARCH'; allowed: AUTO_M2S"):
        check_options((("ARCH", "sm_80"),))


@pytest.mark.processes
def test_the_allowed_options_are_those_the_dsl_declares_to_affect_compilation():
    from cutlass.base_dsl.env_manager import EnvironmentVarManager

    declared = {
        spec.source
        for spec in EnvironmentVarManager._ENV_VAR_SPEC
        if spec.affects_compile and isinstance(spec.source, str)
    }
    assert declared - set(ALLOWED) == {"ARCH", "ENABLE_TVM_FFI", "DRYRUN"}
    assert set(ALLOWED) <= declared
