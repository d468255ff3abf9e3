"""The constants of the dual norm: a residual boundary, that is post-norm, gated addition and the next pre-norm."""

import dataclasses
import math
from typing import ClassVar

from muse_jit.constants.base import ConstantSet

POST_WEIGHTS = ("none", "before", "after")
GATES = ("channel", "scalar")
DTYPES = ("bf16", "fp32")
ORDERS = ("triton-3.8", "triton-3.6", "flashinfer-0.7")
CTAS_PER_ROW = (1, 2, 4, 8)
MAX_HIDDEN = 8192
WIDTH = 8
WARP = 32


@dataclasses.dataclass(frozen=True, eq=False)
class DualNormConstants(ConstantSet):
    """What one dual-norm kernel is specialised on; the number of rows is a run-time value.

    With norm(a, eps, g) = a * rsqrt(mean(a^2) + eps) * g, or the same on a * g where the weight comes before the norm,
    and g = weight + gain_center (no weight: g = 1):
    stream = alpha * stream + beta * norm(partial, post_eps, post g), in place; out = norm(stream, next_eps, next g).

    The attention boundary of Muse Spark, its FFN boundary, and the boundary before the final norm:

        DualNormConstants(8192, 1e-8, next_eps=1e-5, next_gain_center=1.0)
        DualNormConstants(8192, 1e-8, "before", 1.0, next_eps=1e-5, next_gain_center=1.0)
        DualNormConstants(8192, 1e-8, "before", 1.0, next_eps=1e-5)

    Raises:
        ConstantsError: naming the field, its value and what is allowed.
    """

    family: ClassVar[str] = "dual_norm"

    hidden: int
    """Width of a row: a positive multiple of 8, at most 8192, which is where stock ends and its bits are promised."""
    post_eps: float
    """Added to the mean square of the partial sum; finite and positive."""
    post_weight: str = "none"
    """Whether a BF16 weight [hidden] scales the partial sum: "none", "before" or "after" its norm."""
    post_gain_center: float = 0.0
    """Added to the post weight in FP32; finite, and 0.0 without a post weight."""
    gate: str = "channel"
    """Shape of the FP32 gates alpha and beta: "channel" is [hidden], "scalar" is [1]."""
    alpha_tensor: bool = True
    """Whether alpha is an operand; otherwise it is the number `alpha`. Beta always is one."""
    alpha: float = 1.0
    """What the stream is multiplied with where alpha is no operand; 1.0 where it is."""
    next_eps: float = dataclasses.field(kw_only=True)
    """Added to the mean square of the new stream; finite and positive."""
    next_has_weight: bool = True
    """Whether a BF16 weight [hidden] of the next norm is an operand."""
    next_weight_before: bool = False
    """Scale the new stream before the next norm instead of after it; the stored stream is never scaled."""
    next_gain_center: float = 0.0
    """Added to the next weight in FP32; finite, and 0.0 without a next weight."""
    out_dtype: str = "bf16"
    """"bf16" or "fp32"."""
    enable_pdl: bool = True
    """Launch with programmatic dependent launch and wait for the previous grid before reading partial and stream."""
    release_early: bool = False
    """Release the dependent grid right after the wait instead of at exit; needs `enable_pdl`."""
    order: str = "triton-3.8"
    """Whose order of operations: "triton-3.8" (what vLLM 0.33.0 pins), "triton-3.6", or "flashinfer-0.7" (what
    vLLM 0.33.0 runs on sm_100 and sm_103); the latter for those fields only for which FlashInfer has a kernel."""
    ctas_per_row: int = 8
    """1, 2, 4 or 8: how many CTAs of a cluster share a row, each with at least one warp of 256 columns (so 8 needs a
    hidden above 1024). More of them load a row faster; it never changes the bits."""

    def validate(self) -> None:
        if self.hidden <= 0 or self.hidden % WIDTH or self.hidden > MAX_HIDDEN:
            self.refuse("hidden", f"it must be a positive multiple of {WIDTH}, at most {MAX_HIDDEN}")
        for name in ("post_eps", "next_eps"):
            self.require_eps(name)
        self.require_choice("post_weight", POST_WEIGHTS)
        self.require_choice("gate", GATES)
        self.require_choice("out_dtype", DTYPES)
        self.require_choice("order", ORDERS)
        if self.alpha_tensor and self.alpha != 1.0:
            self.refuse("alpha", "it must be 1.0 where alpha is an operand (alpha_tensor=True)")
        self._require_gain("post_gain_center", self.post_weight != "none")
        self._require_gain("next_gain_center", self.next_has_weight)
        if self.next_weight_before and not self.next_has_weight:
            self.refuse("next_weight_before", "without a weight it must be False")
        if self.release_early and not self.enable_pdl:
            self.refuse("release_early", "it needs enable_pdl=True")
        if self.ctas_per_row not in CTAS_PER_ROW or self.threads_per_cta < WARP:
            possible = [n for n in CTAS_PER_ROW if self.row_threads // n >= WARP]
            self.refuse("ctas_per_row", f"allowed with hidden={self.hidden}: {', '.join(map(str, possible))}")
        if self.order == "flashinfer-0.7":
            self._require_flashinfer()

    @property
    def row_threads(self) -> int:
        """Threads that share a row: 8 columns each, of the row padded to a power of two and to a warp's 256."""
        return max(1 << (self.hidden - 1).bit_length(), WIDTH * WARP) // WIDTH

    @property
    def threads_per_cta(self) -> int:
        return self.row_threads // self.ctas_per_row

    def _require_gain(self, field: str, has_weight: bool) -> None:
        value = getattr(self, field)
        if not math.isfinite(value):
            self.refuse(field, "it must be finite")
        if not has_weight and (value != 0.0 or math.copysign(1.0, value) < 0):
            self.refuse(field, "without a weight it must be 0.0")

    def _require_flashinfer(self) -> None:
        allowed = {
            "hidden": (8192,),
            "post_weight": ("none", "before"),
            "gate": ("channel",),
            "next_has_weight": (True,),
            "next_weight_before": (False,),
            "out_dtype": ("bf16",),
        }
        for field, values in allowed.items():
            if getattr(self, field) not in values:
                self.refuse(field, f"order 'flashinfer-0.7' has {' or '.join(map(repr, values))} only")
