"""Build one kernel in a worker process; the artifact comes back in memory."""

import dataclasses
import tempfile
from typing import Any

from muse_jit.compiler.link import find_linker
from muse_jit.compiler.process import run_worker
from muse_jit.constants.base import ConstantSet
from muse_jit.errors import CompileError
from muse_jit.kernels.registry import KernelFamily, class_text
from muse_jit.key.kernel_key import KernelKey
from muse_jit.key.options import as_environment
from muse_jit.key.source import Source
from muse_jit.spans import Span, Spans
from muse_jit.store.cubin import resources


@dataclasses.dataclass(frozen=True)
class Built:
    """A linked kernel and what it took."""

    artifact: bytes
    spans: tuple[Span, ...]
    """The compiler's import (by the server, once), the compile and the link."""
    resources: list[dict[str, Any]]

    @property
    def compile_seconds(self) -> float:
        """Seconds of tracing, compiling and exporting."""
        return Spans(list(self.spans)).seconds("compile")

    @property
    def link_seconds(self) -> float:
        """Seconds of linking."""
        return Spans(list(self.spans)).seconds("link")


def build(
    family: KernelFamily,
    constants: ConstantSet,
    key: KernelKey,
    *,
    runtime_library: str,
    source: Source,
    timeout: float,
    cc: str | None = None,
) -> Built:
    """Compile and link the kernel of `key`.

    Raises:
        LinkerMissing: there is no linker; found out before anything is compiled.
        CompileError: naming the kernel, its constants and the first compiler error; carries the log.
    """
    linker = find_linker(cc)
    request = {
        "build": family.build,
        "constants_class": class_text(type(constants)),
        "constants": key.constants,
        "target": key.target.as_dict(),
        "symbol": key.symbol,
        "source": key.source,
        "modules": source.modules,
        "needs_torch": "torch" in source.outside,
        "needs_cutlass": "cutlass" in source.outside,
        "linker": linker,
        "runtime_library": runtime_library,
    }
    try:
        with tempfile.TemporaryDirectory(prefix="muse_jit-", ignore_cleanup_errors=True) as folder:
            done = run_worker(request, folder, as_environment(key.options), timeout)
            with open(done.library_path, "rb") as file:
                artifact = file.read()
    except CompileError as error:
        message = f"{family.name} for {key.target} did not compile: {error} [constants: {constants}]"
        raise type(error)(message, error.log) from None
    except (
        OSError
    ) as error:  # no room for its folder, no descriptor, no process: this kernel's trouble, not the start's
        message = f"{family.name} for {key.target} cannot be compiled here: {error} [constants: {constants}]"
        raise CompileError(message) from None
    return Built(artifact, done.spans, resources(artifact))
