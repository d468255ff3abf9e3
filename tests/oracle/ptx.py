"""Runs the PTX of a norm kernel on numpy arrays: all threads of all CTAs in lock step, one instruction at a time.

It knows the part of PTX that such kernels use and raises `PtxError` on everything else, so a new instruction never
passes unnoticed; wrong memory accesses and missing barriers raise too (`ptx_memory`, `ptx_cluster`). An instruction
without a rounding mode is run as written, one rounding each; what the assembler may fuse is for a test to look at.
Branches must be uniform.
"""

import re
from collections.abc import Callable
from typing import Any

import numpy as np

from oracle import all_reduce, fp32
from oracle.ptx_access import MemoryInstructions
from oracle.ptx_cluster import Cluster
from oracle.ptx_memory import BASE, DTYPES, GAP, Array, Memory
from oracle.ptx_text import Kernel, PtxError, entries, operands_of

__all__ = ["Kernel", "PtxError", "address_of", "entries", "run"]

COMPARE: dict[str, Any] = {
    "eq": np.equal, "ne": np.not_equal, "lt": np.less, "le": np.less_equal, "gt": np.greater, "ge": np.greater_equal,
}  # fmt: skip
INTEGER: dict[str, Any] = {
    "add": np.add, "sub": np.subtract, "and": np.bitwise_and, "or": np.bitwise_or, "xor": np.bitwise_xor,
}  # fmt: skip
REACHED = 100
"""Number of the first memory beyond the parameters."""
FLOAT: dict[str, Any] = {"mul": fp32.mul, "add": fp32.add, "fma": fp32.fma}


def run(
    kernel: Kernel,
    arguments: list[Any],
    ctas: int,
    rsqrt: Callable[[Array], Array] = fp32.rsqrt,
    *,
    y: tuple[int, int] = (0, 1),
    reached: list[Array] | None = None,
) -> None:
    """Run `ctas` CTAs of one value of (%ctaid.y, %nctaid.y), so that a kernel may branch by it.

    Array arguments are global memory and are written in place; numbers are scalar parameters. `reached` is memory
    that no parameter points to, at the addresses `address_of`.
    """
    if len(arguments) != len(kernel.parameters):
        raise PtxError(f"{len(kernel.parameters)} parameters, {len(arguments)} arguments")
    _Run(kernel, arguments, ctas, rsqrt, y, reached or []).go()


def address_of(number: int) -> int:
    """Where a kernel finds the memory reached[number]."""
    return BASE + (REACHED + number) * GAP


class _Run(MemoryInstructions):
    def __init__(
        self,
        kernel: Kernel,
        arguments: list[Any],
        ctas: int,
        rsqrt: Callable[[Array], Array],
        y: tuple[int, int],
        reached: list[Array],
    ) -> None:
        self.kernel, self.rsqrt = kernel, rsqrt
        self.shape = (ctas, kernel.threads)
        buffers = {i: a.reshape(-1).view(np.uint8) for i, a in enumerate(arguments) if isinstance(a, np.ndarray)}
        buffers |= {REACHED + i: a.reshape(-1).view(np.uint8) for i, a in enumerate(reached)}
        self.memory = Memory(buffers, ctas, kernel.threads, kernel.shared_bytes)
        self.cluster = Cluster(self.memory, ctas, kernel.cluster)
        self.parameters = {
            name: BASE + i * GAP if i in buffers else int(np.float32(a).view(np.uint32)) if type(a) is float else a
            for i, (name, a) in enumerate(zip(kernel.parameters, arguments, strict=True))
        }
        self.lengths = {
            name: len(a) for name, a in zip(kernel.parameters, arguments, strict=True) if isinstance(a, np.ndarray)
        }
        self.scopes: list[dict[str, Any]] = [{}]
        self.nanoseconds = 0
        grid = np.arange(ctas)[:, None]
        self.special = {
            "%tid.x": np.arange(kernel.threads), "%tid.y": 0, "%tid.z": 0, "%laneid": np.arange(kernel.threads) % 32,
            "%ctaid.x": grid, "%ctaid.y": y[0], "%ctaid.z": 0,
            "%ntid.x": kernel.threads, "%nctaid.x": ctas, "%nctaid.y": y[1],
        }  # fmt: skip

    def go(self) -> None:
        statements = self.kernel.statements
        labels = {s[:-1]: i for i, s in enumerate(statements) if s.endswith(":")}
        position = 0
        while position < len(statements):
            statement = statements[position]
            position += 1
            if statement == "{":
                self.scopes.append({})
            elif statement == "}":
                self.scopes.pop()
            elif statement.startswith(".reg "):
                self.declare(statement)
            elif statement.endswith(":") or statement.startswith(".shared "):
                continue
            else:
                target = self.execute(statement)
                if target == "ret":
                    self.cluster.exit()
                    return
                position = labels[target] if target else position

    def declare(self, statement: str) -> None:
        _, kind, names = statement.split(" ", 2)
        dtype = np.bool_ if kind == ".pred" else DTYPES[kind[2:]]
        for name in names.replace(" ", "").split(","):
            match = re.fullmatch(r"(.*)<(\d+)>", name)
            for full in [f"{match[1]}{i}" for i in range(int(match[2]))] if match else [name]:
                self.scopes[-1][full] = np.zeros(self.shape, dtype)

    # Registers and operands

    def scope_of(self, name: str) -> dict[str, Any]:
        for scope in reversed(self.scopes):
            if name in scope:
                return scope
        raise PtxError(f"unknown register {name!r}")

    def read(self, name: str, bits: str) -> Array:
        """The raw bits of an operand, as an unsigned array of this width."""
        dtype = DTYPES[bits]
        if name.startswith("{"):
            parts = [p.strip() for p in name[1:-1].split(",")]
            part_bits = str(int(bits) // len(parts))
            total = sum(self.read(p, part_bits).astype(np.uint64) << np.uint64(i * int(part_bits))
                        for i, p in enumerate(parts))  # fmt: skip
            return np.asarray(total).astype(dtype)
        if name == "%globaltimer":
            self.nanoseconds += 10**9  # each look takes a second
            return np.full(self.shape, self.nanoseconds, dtype)
        if name in self.special:
            return np.broadcast_to(np.asarray(self.special[name]).astype(dtype), self.shape)
        if re.fullmatch(r"0[fF][0-9a-fA-F]{8}", name):
            return np.full(self.shape, int("0x" + name[2:], 0), dtype)
        if re.fullmatch(r"-?\d+|0x[0-9a-fA-F]+", name):
            return np.full(self.shape, int(name, 0) & ((1 << int(bits)) - 1), dtype)
        if name in self.kernel.shared:
            return np.full(self.shape, self.kernel.shared[name], dtype)
        value = self.scope_of(name)[name]
        if value.dtype != dtype:
            raise PtxError(f"{name} is {value.dtype}, read as {bits} bits")
        return value

    def write(self, name: str, value: Array, mask: Array | None) -> None:
        if name.startswith("{"):
            parts = [p.strip() for p in name[1:-1].split(",")]
            bits = value.dtype.itemsize * 8 // len(parts)
            for i, part in enumerate(parts):
                if part != "_":
                    piece = (value >> value.dtype.type(i * bits)).astype(DTYPES[str(bits)])
                    self.write(part, piece, mask)
            return
        scope = self.scope_of(name)
        if scope[name].dtype != value.dtype:
            raise PtxError(f"{name} is {scope[name].dtype}, written as {value.dtype}")
        scope[name] = np.where(mask, value, scope[name]) if mask is not None else np.broadcast_to(value, self.shape)

    def predicate(self, name: str) -> Array:
        negate = name.startswith("!")
        value: Array = self.scope_of(name.lstrip("!"))[name.lstrip("!")]
        return ~value if negate else value

    # Execution

    def execute(self, statement: str) -> str | None:
        """One instruction; the label to jump to, "ret", or None to go on."""
        mask = None
        if statement.startswith("@"):
            guard, statement = statement[1:].split(" ", 1)
            mask = self.predicate(guard)
        name, _, rest = statement.partition(" ")
        args, parts = operands_of(rest), name.split(".")
        if parts[0] in ("ret", "bra"):
            if mask is not None and mask.any() != mask.all():
                raise PtxError(f"{statement!r} is not uniform")
            return None if mask is not None and not mask.any() else "ret" if parts[0] == "ret" else args[0]
        if parts[0] == "griddepcontrol" or name in ("fence.acq_rel.gpu", "bar.warp.sync"):
            return None
        if mask is None and self.cluster.whole(name):
            return None
        if name in ("bar.sync", "barrier.sync") and args == ["0"] and mask is None:
            self.memory.barrier()
            return None
        method = getattr(self, f"op_{parts[0]}", self.op_integer if parts[0] in INTEGER else None)
        if parts[-1] in ("f32", "f32x2") and parts[0] in ("mul", "add", "fma", "rsqrt"):
            method = self.op_float
        elif name == "add.rn.f32.bf16":
            wide = fp32.from_bf16(self.read(args[1], "16"))
            self.write(args[0], fp32.add(wide, self.read(args[2], "32").view(np.float32)).view(np.uint32), mask)
            return None
        if method is None or method(parts, args, mask) is False:
            raise PtxError(f"unknown instruction {statement!r}")
        return None

    def op_float(self, parts: list[str], args: list[str], mask: Array | None) -> bool:
        bits = "64" if parts[-1] == "f32x2" else "32"
        sources = [np.ascontiguousarray(self.read(a, bits)).view(np.float32) for a in args[1:]]
        if parts == ["rsqrt", "approx", "ftz", "f32"]:
            result = self.rsqrt(sources[0])
        elif parts == ["add", "rn", "ftz", "f32"]:
            result = all_reduce.add_flushed(*sources)
        elif parts[1:-1] in ([], ["rn"]) and parts[0] in FLOAT:
            result = FLOAT[parts[0]](*sources)
        else:
            return False
        self.write(args[0], np.ascontiguousarray(result).view(DTYPES[bits]), mask)
        return True

    def op_integer(self, parts: list[str], args: list[str], mask: Array | None) -> bool:
        if parts[-1] == "pred" and parts[0] in ("and", "or", "xor"):
            self.write(args[0], INTEGER[parts[0]](self.predicate(args[1]), self.predicate(args[2])), mask)
            return True
        if len(parts) != 2 or parts[1][0] not in "bsu":
            return False
        a, b = (self.read(x, parts[1][1:]) for x in args[1:])  # two's complement: signs do not matter here
        self.write(args[0], INTEGER[parts[0]](a, b), mask)
        return True

    def typed(self, name: str, kind: str) -> Array:
        """An operand as a signed or unsigned array, as a PTX type such as "s32" says."""
        value = np.ascontiguousarray(self.read(name, kind[1:]))
        return value.view(f"i{int(kind[1:]) // 8}") if kind[0] == "s" else value

    def op_mul(self, parts: list[str], args: list[str], mask: Array | None) -> bool:
        return self.multiply(parts, args, mask, None)

    def op_mad(self, parts: list[str], args: list[str], mask: Array | None) -> bool:
        return self.multiply(parts, args[:3], mask, args[3])

    def multiply(self, parts: list[str], args: list[str], mask: Array | None, addend: str | None) -> bool:
        mode, kind = parts[1], parts[-1]
        if mode not in ("lo", "wide") or len(parts) != 3:
            return False
        bits = str(int(kind[1:]) * (2 if mode == "wide" else 1))
        result = self.typed(args[1], kind).astype(f"i{int(bits) // 8}") * self.typed(args[2], kind).astype(
            f"i{int(bits) // 8}"
        )
        result = result.view(DTYPES[bits])
        self.write(args[0], result if addend is None else result + self.read(addend, bits), mask)
        return True

    def op_neg(self, parts: list[str], args: list[str], mask: Array | None) -> None:
        self.write(args[0], 0 - self.read(args[1], parts[-1][1:]), mask)

    def op_shl(self, parts: list[str], args: list[str], mask: Array | None) -> None:
        value = self.read(args[1], parts[-1][1:])
        self.write(args[0], value << self.read(args[2], "32").astype(value.dtype), mask)

    def op_shr(self, parts: list[str], args: list[str], mask: Array | None) -> None:
        value = self.typed(args[1], parts[-1])
        shifted = value >> self.read(args[2], "32").astype(value.dtype)
        self.write(args[0], shifted.view(DTYPES[parts[-1][1:]]), mask)

    def op_bfe(self, parts: list[str], args: list[str], mask: Array | None) -> bool:
        if parts != ["bfe", "u32"]:
            return False
        field = np.uint32((1 << int(args[3])) - 1)
        self.write(args[0], (self.read(args[1], "32") >> np.uint32(int(args[2]))) & field, mask)
        return True

    def op_mov(self, parts: list[str], args: list[str], mask: Array | None) -> None:
        if parts[-1] == "pred":
            self.write(args[0], np.full(self.shape, int(args[1]) != 0), mask)
        else:
            self.write(args[0], self.read(args[1], parts[-1][1:]), mask)

    def op_cvta(self, parts: list[str], args: list[str], mask: Array | None) -> None:
        """Generic and global addresses are the same numbers here, as on the hardware."""
        self.write(args[0], self.read(args[1], "64"), mask)

    def op_cvt(self, parts: list[str], args: list[str], mask: Array | None) -> bool:
        tail = ".".join(parts[1:])
        if tail == "f32.bf16":
            result = fp32.from_bf16(self.read(args[1], "16")).view(np.uint32)
        elif tail == "rn.bf16x2.f32":
            high, low = (fp32.to_bf16(self.read(a, "32").view(np.float32)).astype(np.uint32) for a in args[1:])
            result = (high << np.uint32(16)) | low
        elif re.fullmatch(r"[su](16|32|64)\.[su](16|32|64)", tail):
            result = self.typed(args[1], parts[2]).astype(f"i{int(parts[1][1:]) // 8}").view(DTYPES[parts[1][1:]])
        else:
            return False
        self.write(args[0], result, mask)
        return True

    def op_setp(self, parts: list[str], args: list[str], mask: Array | None) -> bool:
        if parts[-1][0] == "f" or len(parts) not in (3, 4):
            return False
        result = COMPARE[parts[1]](self.typed(args[1], parts[-1]), self.typed(args[2], parts[-1]))
        if len(parts) == 4:  # joined with a predicate
            result = INTEGER[parts[2]](result, self.predicate(args[3]))
        self.write(args[0], result, mask)
        return True

    def op_selp(self, parts: list[str], args: list[str], mask: Array | None) -> None:
        bits = parts[-1][1:]
        chosen = np.where(self.predicate(args[3]), self.read(args[1], bits), self.read(args[2], bits))
        self.write(args[0], chosen, mask)

    def op_shfl(self, parts: list[str], args: list[str], mask: Array | None) -> bool:
        if parts != ["shfl", "sync", "bfly", "b32"] or args[3] != "31" or args[4] != "-1" or mask is not None:
            return False
        lanes = np.arange(self.kernel.threads)
        self.write(args[0].split("|")[0], self.read(args[1], "32")[:, lanes ^ int(args[2], 0)], None)
        return True
