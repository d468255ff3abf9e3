"""Build one kernel: worker process, then linker; the artifact comes back in memory."""

import dataclasses
import os
import sys
import tempfile
import time
from typing import Any

from muse_jit.compiler.link import find_linker, link
from muse_jit.compiler.process import run_worker
from muse_jit.constants.base import ConstantSet
from muse_jit.errors import CompileError
from muse_jit.kernels.registry import KernelFamily
from muse_jit.key.kernel_key import KernelKey
from muse_jit.key.options import as_environment
from muse_jit.store.cubin import resources


@dataclasses.dataclass(frozen=True)
class Built:
    """A linked kernel and what it took."""

    artifact: bytes
    import_seconds: float
    compile_seconds: float
    link_seconds: float
    resources: list[dict[str, Any]]


def build(
    family: KernelFamily,
    constants: ConstantSet,
    key: KernelKey,
    *,
    runtime_library: str,
    imports: frozenset[str],
    timeout: float,
    cc: str | None = None,
) -> Built:
    """Compile and link the kernel of `key`. `imports` are the outside modules its source reaches.

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
        "needs_torch": "torch" in imports,
        "needs_cutlass": "cutlass" in imports,
    }
    with tempfile.TemporaryDirectory(prefix="muse_jit-") as folder:
        try:
            done = run_worker(request, folder, as_environment(key.options), timeout)
            started = time.perf_counter()
            library = os.path.join(folder, "kernel.so")
            # The linker records the library's name as it is given: a bare name, found by the loader's preload.
            link(linker, done.object_path, library, runtime_library)
        except CompileError as error:
            message = f"{family.name} for {key.target} did not compile: {error} [constants: {constants}]"
            raise CompileError(message, error.log) from None
        with open(library, "rb") as file:
            artifact = file.read()
    seconds = time.perf_counter() - started
    return Built(artifact, done.import_seconds, done.compile_seconds, seconds, resources(artifact))


def class_text(cls: type) -> str:
    """ "module:Class" under which another process can import a class, also when it was defined in a script."""
    module = cls.__module__
    if module == "__main__":
        main = sys.modules["__main__"]
        spec = getattr(main, "__spec__", None)
        file = getattr(main, "__file__", None)
        if spec is not None:
            module = spec.name.removesuffix(".__main__") if spec.name.endswith(".__main__") else spec.name
        elif file is not None:
            module = os.path.splitext(os.path.basename(file))[0]
    return f"{module}:{cls.__qualname__}"
