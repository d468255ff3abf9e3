"""Compile vLLM's stock norm kernels to cubins, without a GPU: the bit oracle of the GPU tests and benchmarks.

    python -m venv /some/where && /some/where/bin/pip install triton==3.8.0 numpy
    pip download --no-deps vllm==0.33.0 and unpack vllm/models/muse_spark/common/ops/fused_rmsnorm.py from it
    /some/where/bin/python benchmarks/make_stock_cubins.py fused_rmsnorm.py .gpu/stock [--arch 90]

Run under the Triton whose bits are wanted: vLLM 0.33.0 pins 3.8.0, and other versions sum in other orders. The kernels
are taken from the unpacked file as they are; nothing of it is kept in this repository. Writes one cubin for each
combination of flags that the stock functions accept at hidden 8192, and `cubins.json` for `benchmarks/stock.py`.
"""

import argparse
import importlib.util
import itertools
import json
import pathlib
import sys
import types

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from triton.compiler import compile as compile_kernel

H = 8192
PLACES = {"none": (False, False), "after": (True, False), "before": (True, True)}


def stock_module(path):
    """The stock file as a module, with stand-ins for what it imports: no vLLM and no torch are needed."""
    stand_ins = {
        "torch": {"Tensor": object, "dtype": object, "bfloat16": None, "float32": None},
        "vllm": {},
        "vllm.platforms": {"current_platform": types.SimpleNamespace(is_cuda=lambda: True)},
        "vllm.triton_utils": {"triton": triton, "tl": triton.language},
    }
    for name, attributes in stand_ins.items():
        module = types.ModuleType(name)
        vars(module).update(attributes)
        sys.modules.setdefault(name, module)
    spec = importlib.util.spec_from_file_location("stock_fused_rmsnorm", path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def row_norms(stock):
    """(name, kernel, pointer dtypes, constants, warps, PDL) of the row norm."""
    for x, out, place in itertools.product(("bf16", "fp32"), ("bf16", "fp32"), PLACES):
        weight, before = PLACES[place]
        pointers = dict(x_ptr=x, y_ptr=out, w_ptr="bf16", s_ptr=x, alpha_ptr=x, beta_ptr=x)
        constants = dict(D=H, HAS_WEIGHT=weight, INPUT_SCALE=before, KAHAN=True, SINGLE_TILE=True, RESIDUAL=False,
                         GATE_STREAM=False, PER_CHANNEL=False, bT=1, bD=H, USE_PDL=True)  # fmt: skip
        yield f"row_{x}_{out}_{place}", stock._rmsnorm_fwd_kernel, pointers, constants, 8, True


def dual_norms(stock):
    """The same of the dual norm: post weight, next weight, shape of the gates, alpha as tensor or number, output."""
    for post, following, gate, alpha, out in itertools.product(
        PLACES, PLACES, ("channel", "scalar"), ("tensor", "float"), ("bf16", "fp32")
    ):
        pointers = dict(branch_ptr="bf16", stream_ptr="fp32", new_stream_ptr="fp32", out_ptr=out, post_w_ptr="bf16",
                        pre_w_ptr="bf16", alpha_ptr="fp32", beta_ptr="fp32")  # fmt: skip
        constants = dict(D=H, POST_HAS_WEIGHT=PLACES[post][0], POST_INPUT_SCALE=PLACES[post][1],
                         PRE_HAS_WEIGHT=PLACES[following][0], PRE_INPUT_SCALE=PLACES[following][1],
                         GATE_STREAM=alpha == "tensor", PER_CHANNEL=gate == "channel", bT=1, bD=H)  # fmt: skip
        name = f"dual_{post}_{following}_{gate}_{alpha}_{out}"
        yield name, stock._norm_residual_norm_fwd_kernel, pointers, constants, 32, False


def build(kernel, pointers, constants, warps, pdl, arch):
    """Compile one variant; pointers are 16-byte aligned, as torch's are."""
    names = kernel.arg_names
    kinds = {n: f"*{pointers[n]}" if n in pointers else "constexpr" if n in constants else "i32" if n == "T" else "fp32"
             for n in names}  # fmt: skip
    source = ASTSource(
        fn=kernel,
        signature=kinds,
        constexprs={(names.index(n),): value for n, value in constants.items()},
        attrs={(i,): [["tt.divisibility", 16]] for i, n in enumerate(names) if n in pointers},
    )
    options = {"num_warps": warps, **({"launch_pdl": True} if pdl else {})}
    built = compile_kernel(source, target=GPUTarget("cuda", arch, 32), options=options)
    arguments = [[n, kinds[n]] for n in names if kinds[n] != "constexpr"] + [["scratch", "*"], ["scratch", "*"]]
    return built, arguments


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("source", type=pathlib.Path, help="the unpacked fused_rmsnorm.py")
    parser.add_argument("folder", type=pathlib.Path)
    parser.add_argument("--arch", default="90")
    options = parser.parse_args()
    options.folder.mkdir(parents=True, exist_ok=True)
    stock = stock_module(options.source)
    table = []
    for name, kernel, pointers, constants, warps, pdl in [*row_norms(stock), *dual_norms(stock)]:
        for arch in map(int, options.arch.split(",")):
            built, arguments = build(kernel, pointers, constants, warps, pdl, arch)
            file = f"{name}_sm{arch}.cubin"
            (options.folder / file).write_bytes(built.asm["cubin"])
            table.append(dict(file=file, entry=kernel.__name__, threads=32 * warps, pdl=pdl,
                              dynamic_shared=built.metadata.shared, arguments=arguments))  # fmt: skip
    document = {"triton": triton.__version__, "kernels": table}
    (options.folder / "cubins.json").write_text(json.dumps(document, indent=1) + "\n")
    print(f"{len(table)} kernels by Triton {triton.__version__} in {options.folder}")


if __name__ == "__main__":
    main()
