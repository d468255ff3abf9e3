"""The constants of the row norm: one RMS norm over each row, with the copies the first decoder layer needs."""

import dataclasses
import math
from typing import ClassVar

from muse_jit.constants.base import ConstantSet

DTYPES = ("bf16", "fp32")
ORDERS = ("triton-3.8", "triton-3.6")
MAX_HIDDEN = 16384


@dataclasses.dataclass(frozen=True, eq=False)
class RowNormConstants(ConstantSet):
    """What one row-norm kernel is specialised on; the number of rows is a run-time value.

    With x the row in FP32 and g = weight + gain_center (no weight: g = 1):
    out = x * rsqrt(mean(x^2) + eps) * g, or the same on x * g when `weight_before_norm`.

    Raises:
        ConstantsError: naming the field, its value and what is allowed.
    """

    family: ClassVar[str] = "row_norm"

    hidden: int
    """Width of a row: a positive multiple of 8 (one thread moves 8 consecutive elements), at most 16384."""
    eps: float
    """Added to the mean square; finite and positive."""
    has_weight: bool
    """Whether a weight of shape [hidden] is an operand."""
    weight_dtype: str = "bf16"
    """"bf16" or "fp32"; "bf16" without a weight, so that one kernel has one key."""
    weight_before_norm: bool = False
    """Scale x before the norm instead of after it (the stock InputScale classes)."""
    gain_center: float = 0.0
    """Added to the weight in FP32 (1.0 for zero-centred weights); finite, and 0.0 without a weight."""
    x_fp32: bool = False
    """x is FP32 instead of BF16."""
    out_dtype: str = "bf16"
    """"bf16" or "fp32"."""
    stream: bool = False
    """Also write x as FP32 into a residual stream of shape [rows, hidden]."""
    aux: bool = False
    """Also write x as FP32 into an auxiliary hidden state of shape [rows, hidden]."""
    enable_pdl: bool = True
    """Launch with programmatic dependent launch and wait for the previous grid before reading x."""
    release_early: bool = False
    """Release the dependent grid right after the wait instead of at exit; needs `enable_pdl`."""
    order: str = "triton-3.8"
    """Whose order of operations: "triton-3.8" (what vLLM 0.33.0 pins) or "triton-3.6"."""

    def validate(self) -> None:
        if self.hidden <= 0 or self.hidden % 8 or self.hidden > MAX_HIDDEN:
            self.refuse("hidden", f"it must be a positive multiple of 8, at most {MAX_HIDDEN}")
        self.require_eps("eps")
        self.require_choice("weight_dtype", DTYPES)
        self.require_choice("out_dtype", DTYPES)
        self.require_choice("order", ORDERS)
        if not math.isfinite(self.gain_center):
            self.refuse("gain_center", "it must be finite")
        if not self.has_weight:
            if self.weight_dtype != "bf16":
                self.refuse("weight_dtype", "without a weight it must be 'bf16'")
            if self.weight_before_norm:
                self.refuse("weight_before_norm", "without a weight it must be False")
            if self.gain_center != 0.0 or math.copysign(1.0, self.gain_center) < 0:
                self.refuse("gain_center", "without a weight it must be 0.0")
        if self.release_early and not self.enable_pdl:
            self.refuse("release_early", "it needs enable_pdl=True")
