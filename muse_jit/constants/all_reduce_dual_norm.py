"""The constants of the dual norm that makes its partial sum itself, by an all-reduce through a mailbox."""

import dataclasses
import math
from typing import ClassVar, Self

from muse_jit.constants.dual_norm import WARP, WIDTH, DualNormConstants
from muse_jit.constants.mailbox import CAPACITY, MAX_CAPACITY, TPS, TRANSPORTS

SUM_ORDERS = ("mnnvl", "node-local")
ROLES = ("both", "consume", "publish")
TIMEOUT_S = 600.0
"""How long a kernel waits for another rank before it gives up: as long as NCCL's watchdog does by default. A healthy
rank is microseconds late, but one that compiles something else at its first step, or loads from a slow disk, minutes;
giving up on it would end the deployment."""
MAX_TIMEOUT_S = 3600.0


@dataclasses.dataclass(frozen=True, eq=False)
class AllReduceDualNormConstants(DualNormConstants):
    """What one fused all-reduce and dual norm is specialised on: the boundary's constants and the mailbox's.

    The partial sums of `tp` ranks are added in the order of stock's all-reduce and rounded to BF16 as there; what
    follows is the dual norm of the same constants, bit for bit. Rank and addresses are run-time values, so the ranks
    of a host share one kernel.

    Raises:
        ConstantsError: naming the field, its value and what is allowed.
    """

    family: ClassVar[str] = "all_reduce_dual_norm"

    tp: int = dataclasses.field(kw_only=True)
    """Ranks that share the sum: 2, 4, 8 or 16."""
    sum_order: str = dataclasses.field(default="mnnvl", kw_only=True)
    """"mnnvl": from +0 in the order of the ranks, in FP32, at 16 ranks two sums of eight, rounded to BF16 once.
    "node-local": from rank 0 in the order of the ranks, rounded to BF16 after every addition. Both flush subnormals."""
    role: str = dataclasses.field(default="both", kw_only=True)
    """"both" publishes this rank's partial sum and consumes all; "consume" finds its own published, too (by the GEMM);
    "publish" only publishes, which is what the GEMM's epilogue does, for tests without one."""
    transport: str = dataclasses.field(default="peer", kw_only=True)
    """"peer" is one store for each rank; "multicast" one for all, through a multicast address."""
    capacity: int = dataclasses.field(default=CAPACITY, kw_only=True)
    """Rows of the mailbox: 1 to 4096. It decides addresses."""
    timeout_s: float = dataclasses.field(default=TIMEOUT_S, kw_only=True)
    """Seconds after which waiting for another rank ends in an error; positive, at most an hour."""
    wait_last: bool = dataclasses.field(default=False, kw_only=True)
    """With role "consume" and `enable_pdl`: take the partial sums as they arrive, and wait for the previous grid only
    before the end. The publisher must be the kernel directly before it, and release its dependents after its own wait,
    not before."""

    @classmethod
    def of(cls, boundary: DualNormConstants, tp: int, sum_order: str, *, published: bool, **mailbox: object) -> Self:
        """The set that follows from a boundary: what the plan lists and what the runtime object asks for.

        `published`: the GEMM publishes, the kernel consumes. `mailbox`: transport, capacity, timeout_s, wait_last.

        Raises: as the class.
        """
        fields = {f.name: getattr(boundary, f.name) for f in dataclasses.fields(DualNormConstants)}
        role = "consume" if published else "both"
        return cls(**fields, tp=tp, sum_order=sum_order, role=role, **mailbox)  # type: ignore[arg-type]

    @property
    def boundary(self) -> DualNormConstants:
        """The constants of the dual norm alone."""
        return DualNormConstants(**{f.name: getattr(self, f.name) for f in dataclasses.fields(DualNormConstants)})

    def validate(self) -> None:
        super().validate()
        if self.tp not in TPS:
            self.refuse("tp", f"allowed: {', '.join(map(str, TPS))}")
        self.require_choice("sum_order", SUM_ORDERS)
        self.require_choice("role", ROLES)
        self.require_choice("transport", TRANSPORTS)
        if not 1 <= self.capacity <= MAX_CAPACITY:
            self.refuse("capacity", f"it must be from 1 to {MAX_CAPACITY}")
        if not (math.isfinite(self.timeout_s) and 0 < self.timeout_s <= MAX_TIMEOUT_S):
            self.refuse("timeout_s", f"it must be positive and at most {MAX_TIMEOUT_S:g} seconds")
        if self.hidden != WIDTH * self.row_threads:
            self.refuse("hidden", f"with an all-reduce it must be a power of two, at least {WIDTH * WARP}")
        if self.out_dtype != "bf16":
            self.refuse("out_dtype", "with an all-reduce it must be 'bf16'")
        if self.wait_last and not (self.role == "consume" and self.enable_pdl):
            self.refuse("wait_last", "it needs role='consume' and enable_pdl=True")
