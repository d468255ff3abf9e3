"""From a deployment (model, tensor parallel size, flags) to the constant sets its decode path needs.

The command line and the vLLM plugin both plan here, so what is warmed is what is asked for.
"""

import dataclasses
import json
import math
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from muse_jit.constants.all_reduce_dual_norm import SUM_ORDERS, AllReduceDualNormConstants
from muse_jit.constants.base import ConstantSet
from muse_jit.constants.dual_norm import DualNormConstants
from muse_jit.constants.gemm_shapes import OPROJ, gemm_constants
from muse_jit.constants.mailbox import CAPACITY, Shape
from muse_jit.constants.row_norm import RowNormConstants
from muse_jit.constants.small_m_gemm import SmallMGemmConstants
from muse_jit.errors import ConstantsError, UsageError
from muse_jit.kernels.registry import family_named
from muse_jit.key.target import check_arch

SCHEMA = 1
ROWS = (1, 2, 3, 4, 5, 6, 7, 8, 16, 32, 64)
"""Row counts (tokens of one decode step) that GEMM launches are planned for."""

ORDERS = ("triton-3.8", "triton-3.6")
FLASHINFER_ARCHES = ("sm_100a", "sm_103a")
"""Where vLLM 0.33.0 takes the attention boundary's norms from FlashInfer (its gate: capabilities 10.0, 10.3, 10.7)."""
FLASHINFER_ORDER = "flashinfer-0.7"

PACKAGE_GEMM_TPS = (8,)
"""Where o_proj is the package's small-M GEMM, which publishes its partial sum into the boundary's mailbox."""

# What each tensor parallel size launches beside the row norm. The standalone dual norm follows stock's all-reduce in a
# deployment without options, at every size.
_BOUNDARY = {
    1: ("dual_norm",),
    2: ("dual_norm", "all_reduce_dual_norm"),
    4: ("dual_norm", "all_reduce_dual_norm"),
    8: ("dual_norm", "small_m_gemm", "all_reduce_dual_norm"),
    16: ("dual_norm",),
}


@dataclasses.dataclass(frozen=True)
class ModelConfig:
    """The numbers of a Muse Spark text model that reach kernel constants."""

    name: str
    hidden_size: int
    num_attention_heads: int
    head_dim: int
    rms_norm_eps: float
    post_norm_eps: float


MUSE_SPARK = ModelConfig("muse-spark", 8192, 128, 64, 1e-5, 1e-8)
"""meta-models/Muse-Spark-Open-816B-A42B: the defaults of transformers' MuseSparkTextConfig."""


@dataclasses.dataclass(frozen=True)
class Deployment:
    """One way of serving a model."""

    model: ModelConfig = MUSE_SPARK
    tp: int = 8
    rows: tuple[int, ...] = ROWS
    order: str = "triton-3.8"
    sum_order: str = "mnnvl"
    pdl: bool = True


@dataclasses.dataclass(frozen=True)
class Planned:
    """One kernel to have: a constant set for one architecture."""

    constants: ConstantSet
    arch: str


@dataclasses.dataclass(frozen=True)
class Plan:
    """What a deployment needs."""

    kernels: tuple[Planned, ...]
    unavailable: tuple[tuple[str, str], ...] = ()
    """Kernel family and why it is missing: of a plan that was read. This version can build all that it plans."""
    origin: dict[str, Any] = dataclasses.field(default_factory=dict)
    """The selection that led here, for people who read the plan."""

    def as_dict(self) -> dict[str, Any]:
        """The plan as one JSON document, which `read_plan` reads back."""
        kernels = [
            {"kernel": p.constants.family, "arch": p.arch, "constants": p.constants.as_dict()} for p in self.kernels
        ]
        unavailable = [{"kernel": name, "reason": reason} for name, reason in self.unavailable]
        return {"schema": SCHEMA, **self.origin, "kernels": kernels, "unavailable": unavailable}

    def only(self, family: str) -> "Plan":
        """The part of the plan that is of one family.

        Raises:
            UsageError: the plan has nothing of that family; names what it has.
        """
        kernels = tuple(p for p in self.kernels if p.constants.family == family)
        unavailable = tuple(u for u in self.unavailable if u[0] == family)
        if not kernels and not unavailable:
            have = sorted({p.constants.family for p in self.kernels} | {u[0] for u in self.unavailable})
            raise UsageError(f"the plan has no kernel of family {family!r}; it has: {', '.join(have) or 'nothing'}")
        return dataclasses.replace(self, kernels=kernels, unavailable=unavailable)


def make_plan(deployment: Deployment, arches: Iterable[str]) -> Plan:
    """The kernels of a deployment, for each architecture.

    Raises:
        UsageError: the tensor parallel size is not one that is planned for, or does not divide the model.
        ConstantsError: the model's numbers are not possible for a kernel.
    """
    model, tp = deployment.model, deployment.tp
    if tp not in _BOUNDARY:
        raise UsageError(f"tensor parallel size {tp}; allowed: {', '.join(map(str, _BOUNDARY))}")
    if model.num_attention_heads % tp:
        raise UsageError(
            f"tensor parallel size {tp} does not divide the {model.num_attention_heads} attention heads of {model.name}"
        )
    for name, allowed in (("order", ORDERS), ("sum_order", SUM_ORDERS)):
        if getattr(deployment, name) not in allowed:
            raise UsageError(f"{name} {getattr(deployment, name)!r}; allowed: {', '.join(allowed)}")
    if not deployment.rows or not all(1 <= r <= ROWS[-1] for r in deployment.rows):
        raise UsageError(f"rows {list(deployment.rows)}; each must be from 1 to {ROWS[-1]}")
    checked = tuple(dict.fromkeys(check_arch(a) for a in arches))
    kernels = [Planned(c, arch) for arch in checked for c in layer_front(deployment)]
    for family in _BOUNDARY[tp]:
        if family == "dual_norm":
            kernels += [Planned(attention_boundary(deployment, arch), arch) for arch in checked]
        elif family == "all_reduce_dual_norm":
            kernels += [Planned(fused_boundary(deployment, arch), arch) for arch in checked]
        else:
            kernels += [Planned(constants, arch) for arch in checked for constants in o_proj_gemm(deployment, arch)]
    origin = {
        "model": model.name,
        "tp": tp,
        "rows": list(deployment.rows),
        "order": deployment.order,
        "sum_order": deployment.sum_order,
        "pdl": deployment.pdl,
    }
    return Plan(tuple(kernels), origin=origin)


def layer_front(deployment: Deployment) -> tuple[RowNormConstants, RowNormConstants]:
    """The first layer's row norm for BF16 and for FP32 embeddings: pre_qkv_proj_norm, weight after, zero-centred.

    Both are needed: the omni class embeds to BF16, the text class to FP32. No published draft model taps layer 0, so
    no auxiliary state is planned.
    """
    first, second = (
        RowNormConstants(
            hidden=deployment.model.hidden_size,
            eps=deployment.model.rms_norm_eps,
            has_weight=True,
            gain_center=1.0,
            x_fp32=x_fp32,
            stream=True,
            enable_pdl=deployment.pdl,
            release_early=deployment.pdl,
            order=deployment.order,
        )
        for x_fp32 in (False, True)
    )
    return first, second


def attention_boundary(deployment: Deployment, arch: str) -> DualNormConstants:
    """The standalone dual norm after the attention's all-reduce: post_attn_norm without weight, gates by channel,
    pre_ffn_norm with a zero-centred weight after it.

    On sm_100 and sm_103 stock runs FlashInfer's kernel, whatever Triton is installed; elsewhere Triton's. The kernel
    releases its dependents right after its own wait: a dependent that was launched early waits for this whole grid
    before it reads, and one launched without PDL starts after it anyway.
    """
    return DualNormConstants(
        hidden=deployment.model.hidden_size,
        post_eps=deployment.model.post_norm_eps,
        next_eps=deployment.model.rms_norm_eps,
        next_gain_center=1.0,
        enable_pdl=deployment.pdl,
        release_early=deployment.pdl,
        order=FLASHINFER_ORDER if arch in FLASHINFER_ARCHES else deployment.order,
    )


def fused_boundary(deployment: Deployment, arch: str) -> AllReduceDualNormConstants:
    """The same boundary with the all-reduce in it: what `AllReduceDualNorm.bind` asks for at this size."""
    return AllReduceDualNormConstants.of(
        attention_boundary(deployment, arch),
        deployment.tp,
        deployment.sum_order,
        published=deployment.tp in PACKAGE_GEMM_TPS,
    )


def o_proj_gemm(deployment: Deployment, arch: str) -> tuple[SmallMGemmConstants, ...]:
    """The GEMM of a rank's o_proj, x [b, heads * head_dim / TP] to [b, hidden], which publishes what the boundary
    consumes: one for each bucket of the rows."""
    model = deployment.model
    k = model.num_attention_heads // deployment.tp * model.head_dim
    mailbox = Shape(deployment.tp, CAPACITY, model.hidden_size)
    return gemm_constants(model.hidden_size, k, deployment.rows, arch, pdl=deployment.pdl, shape=OPROJ, mailbox=mailbox)


def read_model(path: str) -> ModelConfig:
    """The model that a Hugging Face config.json describes.

    Raises:
        UsageError: the file cannot be read, is not a Muse Spark config, or lacks a field; one line says which.
    """
    document = _read_json(path, "model config")
    kind = document.get("model_type")
    text = document.get("text_config") if kind == "muse_spark" else document if kind == "muse_spark_text" else None
    if kind not in ("muse_spark", "muse_spark_text"):
        raise UsageError(f"{path} has model_type {kind!r}; supported: muse_spark, muse_spark_text")
    if not isinstance(text, dict):
        raise UsageError(f"{path} has no text_config object")
    return model_of(path, text)


def model_of(name: str, text: Mapping[str, Any]) -> ModelConfig:
    """The model of a Muse Spark text config, given as its fields.

    Raises:
        UsageError: a field is missing or not a possible number; names it and `name`.
    """
    return ModelConfig(
        name=name,
        hidden_size=_positive(name, text, "hidden_size", int),
        num_attention_heads=_positive(name, text, "num_attention_heads", int),
        head_dim=_positive(name, text, "head_dim", int),
        rms_norm_eps=_positive(name, text, "rms_norm_eps", float),
        post_norm_eps=_positive(name, text, "post_norm_eps", float),
    )


def _positive(path: str, text: Mapping[str, Any], name: str, kind: Callable[[Any], Any]) -> Any:
    value: Any = text.get(name)
    if type(value) not in (int, float) or not 0 < value < math.inf or kind(value) != value:
        word = "whole" if kind is int else "finite"
        raise UsageError(f"{path} needs a positive {word} number {name} in its text config, not {value!r}")
    return kind(value)


def read_plan(path: str, arches: Iterable[str] = ()) -> Plan:
    """A plan written by `muse-jit plan`, or its text; `arches`, if any, replace the architectures it was made for.

    A text begins with a brace; that is how error messages name kernels that no deployment's plan has.

    Raises:
        UsageError: the file cannot be read or is not a plan; one line says what is wrong.
        ConstantsError: a constant set in it is not possible.
    """
    document = _parse_json(path, "plan") if path.lstrip().startswith("{") else _read_json(path, "plan")
    path = "the plan" if path.lstrip().startswith("{") else path
    if document.get("schema") != SCHEMA or not isinstance(document.get("kernels"), list):
        raise UsageError(f"{path} is not a plan of schema {SCHEMA} (write one with: muse-jit plan > FILE)")
    wanted = [check_arch(a) for a in arches]
    kernels: dict[Planned, None] = {}
    for number, item in enumerate(document["kernels"]):
        try:
            constants = family_named(item["kernel"]).constants_class.from_dict(item["constants"])
            for arch in wanted or [check_arch(item["arch"])]:
                kernels[Planned(constants, arch)] = None
        except (KeyError, TypeError) as error:
            raise UsageError(f"{path}, kernel {number}: kernel, arch and constants are needed ({error})") from None
        except (UsageError, ConstantsError) as error:
            raise type(error)(f"{path}, kernel {number}: {error}") from None
    unavailable = document.get("unavailable", [])
    missing = tuple((str(u["kernel"]), str(u["reason"])) for u in unavailable if isinstance(u, dict))
    known = ("schema", "kernels", "unavailable")
    return Plan(tuple(kernels), missing, {k: v for k, v in document.items() if k not in known})


def _read_json(path: str, what: str) -> dict[str, Any]:
    try:
        with open(path, encoding="utf-8") as file:
            text = file.read()
    except OSError as error:
        raise UsageError(f"{what} {path}: {error.strerror}") from None
    except ValueError as error:
        raise UsageError(f"{what} {path} is not JSON: {error}") from None
    return _parse_json(text, f"{what} {path}")


def _parse_json(text: str, what: str) -> dict[str, Any]:
    try:
        document = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise UsageError(f"{what} is not JSON: {error}") from None
    if not isinstance(document, dict):
        raise UsageError(f"{what} is not a JSON object")
    return document
