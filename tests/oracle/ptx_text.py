"""A PTX text taken apart: one entry with its parameters, block size, shared variables and statements."""

import re


class PtxError(Exception):
    """The text is not PTX that the interpreter knows, or it does something that a kernel must not."""


EXTERN_BYTES = 1 << 16
"""What dynamic shared memory, whose size is a matter of the launch, has here."""


def split(body: str) -> list[str]:
    """Statements of a kernel body: "{" and "}" of blocks, labels with their colon, instructions without semicolon."""
    statements, position = [], 0
    pattern = re.compile(r"\s*(?:([{}])|([$\w]+:)(?!:)|([^;]+);)")
    while match := pattern.match(body, position):
        statements.append(re.sub(r"\s+", " ", match.group(match.lastindex or 0)).strip())
        position = match.end()
    if body[position:].strip():
        raise PtxError(f"cannot read {body[position:].strip()[:60]!r}")
    return statements


def operands_of(text: str) -> list[str]:
    """Split at commas outside of braces and brackets."""
    return [part.strip() for part in re.findall(r"(?:\{[^}]*\}|\[[^\]]*\]|[^,])+", text)]


def entries(text: str) -> list[str]:
    """A PTX text with several kernels as several texts with one each, in order."""
    head, *bodies = re.split(r"^(?=\.visible \.entry)", text, flags=re.MULTILINE)
    return [head + body for body in bodies]


class Kernel:
    """The one entry of a PTX text, launched in clusters of `cluster` CTAs (which the text does not say)."""

    def __init__(self, text: str, cluster: int = 1) -> None:
        self.cluster = cluster
        text = re.sub(r"//[^\n]*|/\*.*?\*/", "", text, flags=re.DOTALL)
        text = re.sub(r"^\s*\.(loc|file|pragma)\b[^\n]*$", "", text, flags=re.MULTILINE)
        entry = re.search(r"\.entry\s+([$\w]+)\s*\((.*?)\)(.*?)\{(.*?)^\}", text, flags=re.DOTALL | re.MULTILINE)
        if entry is None:
            raise PtxError("no .entry")
        self.name, parameters, directives, body = entry.groups()
        self.parameters: list[str] = re.findall(r"([$\w]+)(?:\[\d+\])?\s*(?:,|$)", parameters)
        threads = re.search(r"\.(?:reqntid|maxntid)\s+(\d+)(?:\s*,\s*1)*\s*$", directives.strip())
        if threads is None:
            raise PtxError("the block shape is not fixed, or not one-dimensional")
        self.threads = int(threads.group(1))
        self.statements = split(body)
        self.shared: dict[str, int] = {}
        self.shared_bytes = 0
        for name, size in re.findall(r"\.shared\s[^;]*?([$\w]+)\[(\d*)\]", text):
            self.shared[name] = self.shared_bytes
            self.shared_bytes += (int(size or EXTERN_BYTES) + 15) // 16 * 16

    def instructions(self) -> list[str]:
        """Every instruction in order, predicates removed, as "name operands"."""
        plain = [re.sub(r"^@!?[%\w]+ ", "", s) for s in self.statements]
        return [s for s in plain if s[0] not in "{}." and not s.endswith(":")]

    def opcodes(self) -> list[str]:
        return [s.split(" ")[0] for s in self.instructions()]
