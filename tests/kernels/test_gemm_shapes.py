"""Every GEMM that is shipped or planned, compiled: nothing spills, and a block fits an SM."""

from dataclasses import dataclass

import pytest
from oracle.sass import local_bytes, registers

from muse_jit.constants.gemm_shapes import gemm_constants, table
from muse_jit.constants.small_m_gemm import WARP
from muse_jit.kernels import small_m_gemm
from muse_jit.plan import Deployment, make_plan

REGISTERS = 65536  # of an SM
ARCHES = ("sm_90a", "sm_100a", "sm_103a", "sm_120a")


@dataclass(frozen=True)
class Target:
    arch: str


def _cases():
    """(architecture, constants): those of the table, and what TP8 has on each architecture."""
    shipped = [(e.arch, c) for e in table().values() for c in gemm_constants(e.n, e.k, [e.rows], e.arch, pdl=True)]
    planned = [(p.arch, p.constants) for p in make_plan(Deployment(tp=8), ARCHES).only("small_m_gemm").kernels]
    return list(dict.fromkeys(shipped + planned))


@pytest.mark.parametrize(("arch", "constants"), _cases(), ids=str)
def test_nothing_spills_and_a_block_fits(tmp_path, arch, constants):
    small_m_gemm.build(constants, Target(arch), dump_dir=tmp_path)
    (file,) = tmp_path.glob("*.cubin")
    cubin = file.read_bytes()
    assert local_bytes(cubin) == [0]
    (used,) = registers(cubin)
    assert 0 < used * constants.warps * WARP <= REGISTERS
