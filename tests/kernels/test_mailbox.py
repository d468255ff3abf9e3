"""The mailbox's device functions as an epilogue uses them: narrow stores, and rows that are not there."""

import dataclasses
import pathlib

import cutlass
import numpy as np
import pytest
from cutlass import Int32, Int64, cute
from cutlass.cute.runtime import make_fake_compact_tensor
from oracle import all_reduce, ptx

from muse_jit.constants.mailbox import FAILED, Shape
from muse_jit.kernels import build as building
from muse_jit.kernels import memory
from muse_jit.kernels.mailbox import Mailbox, canonical

SHAPE = Shape(tp=2, capacity=4, width=256)


@dataclasses.dataclass(frozen=True)
class Target:
    arch: str


class Epilogue:
    """A warp a row: each thread publishes `count` words of its 8 columns, in rows below `limit`."""

    def __init__(self, shape: Shape, count: int, limit: int) -> None:
        self.shape, self.count, self.limit = shape, count, limit

    @cute.jit
    def __call__(self, x, table, state, stream):
        rows = Int32(cute.size(x, mode=[0]))
        self.kernel(x, table, state).launch(grid=(rows, 1, 1), block=(32, 1, 1), stream=stream)

    @cute.kernel
    def kernel(self, x, table, state):
        self.trace(x, table, state)

    def trace(self, x, table, state):
        row, column = Int32(cute.arch.block_idx()[0]), Int32(cute.arch.thread_idx()[0]) * Int32(8)
        mailbox = Mailbox(self.shape, table, state)
        mailbox.open()
        address = x.iterator.toint() + (Int64(row) * Int64(self.shape.width) + Int64(column)) * Int64(2)
        words = memory.load(address, 0, 8, bf16=True).words
        generation = mailbox.generation(Int64(row))
        mine = [canonical(word) for word in words[: self.count]]
        inside = Int32(row < Int32(self.limit))
        mailbox.publish(mine, generation, Int64(row), column, own=True, inside=inside)


def compiled(shape, count, limit, arch, folder):
    x = building.row_tensor("bf16", building.symbolic_rows(), shape.width)
    table = make_fake_compact_tensor(cutlass.Int64, (shape.tp + 2,), assumed_align=8)
    state = make_fake_compact_tensor(cutlass.Int32, (shape.capacity,), assumed_align=4)
    built = building.compile_for(Target(arch), Epilogue(shape, count, limit), x, table, state, dump_dir=folder)
    return ptx.Kernel(built.artifacts.PTX)


@pytest.mark.parametrize("count", [1, 2, 4])
def test_an_epilogue_publishes_what_is_inside(count: int, tmp_path: pathlib.Path) -> None:
    kernel = compiled(SHAPE, count, 3, "sm_90a", tmp_path)
    x = np.random.default_rng(1).integers(0, 1 << 16, (4, 256), np.uint16)
    x[:, ::3] = 0x8000
    buffers = [np.full((3, 2, 4, 256), 0x8000, np.uint16) for _ in range(2)]
    state = np.array([1, FAILED, 2, 0], np.int32)
    table = np.array([ptx.address_of(1), ptx.address_of(0), 1, 0], np.int64)
    ptx.run(kernel, [x, table, state], 4, reached=buffers)
    wanted = np.full((3, 2, 4, 256), 0x8000, np.uint16)
    columns = np.arange(256) % 8 < 2 * count
    for row in (0, 2):  # row 1 has failed, row 3 is not inside
        wanted[state[row], 1, row, columns] = all_reduce.canonical(x)[row, columns]
    assert all((buffer == wanted).all() for buffer in buffers)


@pytest.mark.parametrize("arch", ["sm_90a", "sm_100a"])
@pytest.mark.parametrize(("count", "vector"), [(1, ""), (2, ".v2"), (4, ".v4")])
def test_by_multicast_it_is_one_store(arch: str, count: int, vector: str, tmp_path: pathlib.Path) -> None:
    kernel = compiled(dataclasses.replace(SHAPE, transport="multicast"), count, 3, arch, tmp_path)
    stores = [op for op in kernel.opcodes() if ".sys." in op]
    assert stores == [f"multimem.st.relaxed.sys.global{vector}.f32"]
