"""What the GPU would run: the machine code of a cubin in words, and how often which instruction stands in it.

A cubin is data here. It is written to a temporary file and read by NVIDIA's disassembler, where one is installed.
"""

import dataclasses
import glob
import os
import re
import shutil
import sysconfig
import tempfile
from collections import Counter

from muse_jit.errors import MuseJitError
from muse_jit.store.cubin import cubins

INSTALL = "pip install nvidia-cuda-nvdisasm, or put nvdisasm or cuobjdump of a CUDA toolkit on the PATH"

# Class of instructions to the beginnings of their mnemonics; the first that fits counts.
_CLASSES: dict[str, tuple[str, ...]] = {
    "spill": ("LDL", "STL"),
    "tensor": ("HMMA", "IMMA", "DMMA", "BMMA", "QMMA", "OMMA", "HGMMA", "IGMMA", "QGMMA", "BGMMA", "UTC", "WARPGROUP"),
    "global memory": ("LDG", "STG", "RED", "ATOMG", "ATOM", "LD", "ST", "UBLKCP", "UTMA", "CCTL", "UBLKPF", "UBLKRED"),
    "shared memory": ("LDS", "STS", "ATOMS", "LDSM", "STSM", "SYNCS", "STAS", "REDAS"),
    "constants": ("LDC", "ULDC", "LDCU"),
    "float": ("FADD", "FMUL", "FFMA", "FMNMX", "FSEL", "FSET", "FCHK", "FSWZADD", "MUFU", "DADD", "DMUL", "DFMA",
              "DSETP", "HADD", "HMUL", "HFMA", "HSET", "HMNMX"),
    "conversion": ("F2", "I2", "FRND"),
    "shuffle and vote": ("SHFL", "VOTE", "MATCH", "REDUX", "CREDUX"),
    "barrier and order": ("BAR", "MEMBAR", "ERRBAR", "DEPBAR", "FENCE", "ACQBULK", "UCGABAR", "LDGDEPBAR", "WARPSYNC",
                          "B2R", "R2B", "ELECT", "CGAERRBAR", "NANOSLEEP"),
    "control": ("BRA", "BRX", "JMP", "EXIT", "CALL", "RET", "BSSY", "BSYNC", "BREAK", "BMOV", "YIELD", "NOP", "PREEXIT",
                "KILL", "BPT"),
    "integer and moves": (),
}  # fmt: skip
CLASSES = tuple(_CLASSES)
_EXACT = ("LD", "ST", "RED", "ATOM")  # also the beginnings of others


class NoDisassembler(MuseJitError):
    """None is installed; the message says what to install."""


@dataclasses.dataclass(frozen=True)
class Mix:
    """The instructions of one GPU kernel, by mnemonic."""

    name: str
    counts: Counter[str]

    @property
    def classes(self) -> dict[str, int]:
        """Class of instructions to how many there are; only classes that occur."""
        result = dict.fromkeys(CLASSES, 0)
        for mnemonic, count in self.counts.items():
            result[class_of(mnemonic)] += count
        return {name: count for name, count in result.items() if count}


def class_of(mnemonic: str) -> str:
    """The class of an instruction, "global memory" for LDG for instance."""
    for name, beginnings in _CLASSES.items():
        if any(mnemonic == b if b in _EXACT else mnemonic.startswith(b) for b in beginnings):
            return name
    return CLASSES[-1]


def disassembler() -> list[str]:
    """The command that turns a cubin's path into text.

    Raises:
        NoDisassembler: there is none.
    """
    for name, options in (("nvdisasm", ["-c"]), ("cuobjdump", ["-sass"])):
        found = shutil.which(name) or next(iter(_bundled(name)), None)
        if found:
            return [found, *options]
    raise NoDisassembler(f"no disassembler is installed; {INSTALL}")


def _bundled(name: str) -> list[str]:
    """Disassemblers that a wheel or a toolkit brought and that are not on the PATH, newest first."""
    site = glob.escape(sysconfig.get_path("purelib"))
    patterns = (f"{site}/nvidia/*/bin/{name}", f"{site}/nvidia_cutlass_dsl/**/{name}", f"/usr/local/cuda*/bin/{name}")
    found = [path for pattern in patterns for path in sorted(glob.glob(pattern, recursive=True), reverse=True)]
    return [path for path in found if os.access(path, os.X_OK)]


def sass(artifact: bytes) -> str:
    """The machine code of an artifact as the disassembler prints it; empty for one without a cubin.

    Raises:
        NoDisassembler: there is none, or it failed, with its first line.
    """
    import subprocess  # 20 ms, and only here

    command = disassembler()
    texts = []
    for cubin in cubins(artifact):
        with tempfile.NamedTemporaryFile(prefix="muse_jit-", suffix=".cubin") as file:
            file.write(cubin)
            file.flush()
            try:
                done = subprocess.run(
                    [*command, file.name], stdin=subprocess.DEVNULL, capture_output=True, timeout=120, check=False
                )
            except (OSError, subprocess.TimeoutExpired) as error:
                raise NoDisassembler(f"{command[0]} could not be run: {error}; {INSTALL}") from None
        if done.returncode:
            lines = (done.stderr or done.stdout).decode("utf-8", "replace").strip().splitlines()
            raise NoDisassembler(f"{command[0]} failed: {lines[0] if lines else done.returncode}; {INSTALL}")
        texts.append(done.stdout.decode("utf-8", "replace"))
    return "\n".join(texts)


_START = re.compile(r"^\s*\.section\s+\.text\.([^,\s]+)|^\s*Function\s*:\s*(\S+)")
_INSTRUCTION = re.compile(r"^\s*/\*[0-9a-f]{4,}\*/\s+(?:\{\s*)?(?:@!?U?P[T\d]+\s+)?([A-Z][A-Z0-9]*)")


def mixes(text: str) -> list[Mix]:
    """The instruction mix of each kernel in a disassembler's text."""
    result: list[Mix] = []
    for line in text.splitlines():
        start = _START.match(line)
        if start:
            result.append(Mix(start[1] or start[2], Counter()))
        elif result and (match := _INSTRUCTION.match(line)):
            result[-1].counts[match[1]] += 1
    return result


def ptx(artifact: bytes) -> str:
    """PTX that an artifact holds as text; empty where it holds machine code only."""
    texts = re.findall(rb"\.version \d+\.\d+[\t\n\r\x20-\x7e]*?\.target sm_[\t\n\r\x20-\x7e]+", artifact)
    return "\n".join(t.decode("ascii") for t in texts)
