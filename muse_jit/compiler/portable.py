"""Make a compiled kernel's host code independent of the machine it is compiled on, and its state reachable.

The DSL generates the host part of a kernel (checks of operands, the launch) for the very CPU it runs on: on a machine
with AVX-512 its functions copy with 512-bit registers, and a host without them dies of SIGILL at the first call. The
key says x86_64 and nothing more, and caches travel in images, so the host code is generated for the baseline of the
architecture. It is launch code: nothing in it gains from wider registers.
"""

from typing import Any

from muse_jit.key.kernel_key import STATE_SYMBOL

_BASELINE = {"x86_64": ("x86-64", "+sse2"), "aarch64": ("generic", "+neon")}


def make_portable(compiled: Any, host: str) -> None:
    """Change what `cute.compile` returned before it is exported; what has no MLIR module is left as it is."""
    module = getattr(compiled, "ir_module", None)
    if module is None or host not in _BASELINE:
        return
    from cutlass._mlir import ir

    cpu, features = _BASELINE[host]
    with module.context:
        feature_list = ir.Attribute.parse(f'#llvm.target_features<["{features}"]>')
        for operation in module.body.operations:
            attributes = operation.operation.attributes
            if operation.operation.name == "llvm.func":
                attributes["target_cpu"] = ir.StringAttr.get(cpu)
                attributes["target_features"] = feature_list
            elif operation.operation.name == "llvm.mlir.global":
                name = ir.StringAttr(attributes["sym_name"]).value
                if name.endswith("_cuda_state"):
                    _export(module, operation.operation, name)


def _export(module: Any, operation: Any, name: str) -> None:
    from cutlass._mlir import ir

    ir.SymbolTable.replace_all_symbol_uses(name, STATE_SYMBOL, module.operation)
    ir.SymbolTable.set_symbol_name(operation, STATE_SYMBOL)
    operation.attributes["linkage"] = ir.Attribute.parse("#llvm.linkage<external>")
