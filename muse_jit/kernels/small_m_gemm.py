"""Small-M GEMM: out [b, n] = x [b, k] weight [n, k]^T for the few rows of a decode step; BF16, FP32 sums.

The time is that of reading the weight once, so everything serves that: as much of a block's weight as its shared memory
holds is sent for before the wait for the previous grid, on which the weight does not depend; x follows after it. The
copies themselves are made by the copy engine, so few warps suffice, and the SM's load and store unit stays free.

Two kernels: `gemm_mma` for every architecture, `gemm_wgmma` for sm_90a. `gemm_tile` is what they have in common.
"""

from typing import Any

import cutlass
from cutlass.cute.runtime import make_fake_compact_tensor

from muse_jit.constants.small_m_gemm import SmallMGemmConstants
from muse_jit.kernels import build as building
from muse_jit.kernels.gemm_mma import MmaGemm
from muse_jit.kernels.gemm_wgmma import WgmmaGemm


def build(constants: SmallMGemmConstants, target: building.Target, dump_dir: Any = None) -> Any:
    """Compile the GEMM; the result takes x [b, k], weight [n, k] and out [b, n], all BF16, 1 <= b <= rows.

    With `publish_tp` it takes the mailbox's table int64 [tp + 2] and state int32 [capacity] behind them, and publishes
    its results there, too; a kernel that consumes them must be the next to use the mailbox.
    """
    c = constants
    c.validate_for(target.arch)
    rows = building.symbolic_rows()
    operands = [
        building.row_tensor("bf16", rows, c.k),
        building.row_tensor("bf16", c.n, c.k),
        building.row_tensor("bf16", rows, c.n),
    ]
    if c.publish_tp:
        operands.append(make_fake_compact_tensor(cutlass.Int64, (c.publish_tp + 2,), assumed_align=8))
        operands.append(make_fake_compact_tensor(cutlass.Int32, (c.capacity,), assumed_align=4))
    kernel = WgmmaGemm(c) if c.wgmma else MmaGemm(c)
    return building.compile_for(target, kernel, *operands, dump_dir=dump_dir)
