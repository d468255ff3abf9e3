"""vLLM's stock norm kernels as cubins, launched through the CUDA driver: the bit oracle, and the other side of timings.

`make_stock_cubins.py` makes them, without a GPU, by the Triton version that vLLM pins (3.8.0); whatever Triton a GPU
machine carries may sum in another order. They are never committed; they are looked for at .gpu/stock (and those of
Triton 3.6.0 at .gpu/stock36) below the repository.
"""

import ctypes
import json
import pathlib

import torch
from cuda.bindings import driver

DEFAULT = pathlib.Path(__file__).resolve().parent.parent / ".gpu" / "stock"
DTYPES = {torch.bfloat16: "bf16", torch.float32: "fp32"}
_C_TYPES = {"i32": ctypes.c_int32, "fp32": ctypes.c_float}


def available(folder=DEFAULT):
    """Whether the cubins are there."""
    return (pathlib.Path(folder) / "cubins.json").is_file()


def _check(result):
    code, *values = result
    if code != driver.CUresult.CUDA_SUCCESS:
        raise RuntimeError(f"CUDA driver error {code}")
    return values[0] if len(values) == 1 else values


class StockKernel:
    """One cubin's kernel. Called with a value per argument (tensors, numbers, None); one CTA a row."""

    def __init__(self, folder, description):
        self.kinds = [kind for _, kind in description["arguments"]]
        self.threads, self.shared = description["threads"], description["dynamic_shared"]
        path = str(pathlib.Path(folder) / description["file"]).encode()
        self.library = _check(driver.cuLibraryLoadFromFile(path, [], [], 0, [], [], 0))
        self.kernel = _check(driver.cuLibraryGetKernel(self.library, description["entry"].encode()))
        self.function = _check(driver.cuKernelGetFunction(self.kernel))
        self.attributes = []
        if description["pdl"]:
            attribute = driver.CUlaunchAttribute()
            attribute.id = driver.CUlaunchAttributeID.CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION
            attribute.value.programmaticStreamSerializationAllowed = 1
            self.attributes = [attribute]

    def __call__(self, rows, *arguments):
        values = [
            ctypes.c_void_p(0 if a is None else a.data_ptr()) if kind.startswith("*") else _C_TYPES[kind](a)
            for a, kind in zip(arguments, self.kinds, strict=True)
        ]
        pointers = (ctypes.c_void_p * len(values))(*(ctypes.addressof(v) for v in values))
        config = driver.CUlaunchConfig()
        config.gridDimX, config.gridDimY, config.gridDimZ = rows, 1, 1
        config.blockDimX, config.blockDimY, config.blockDimZ = self.threads, 1, 1
        config.sharedMemBytes = self.shared
        config.hStream = torch.cuda.current_stream().cuda_stream
        config.attrs, config.numAttrs = self.attributes, len(self.attributes)
        _check(driver.cuLaunchKernelEx(config, self.function, ctypes.addressof(pointers), 0))


class Stock:
    """The stock norms on torch tensors, by the Triton version whose cubins lie in `folder`."""

    def __init__(self, folder=DEFAULT, arch=90):
        torch.zeros(1, device="cuda")  # the primary context, which kernels are loaded into
        table = json.loads((pathlib.Path(folder) / "cubins.json").read_text())
        self.triton = table["triton"]
        self.folder = folder
        suffix = f"_sm{arch}.cubin"
        self.described = {k["file"].removesuffix(suffix): k for k in table["kernels"] if k["file"].endswith(suffix)}
        self.kernels = {}

    def kernel(self, name):
        """One kernel, loaded at its first use (which must not be during a capture)."""
        if name not in self.kernels:
            self.kernels[name] = StockKernel(self.folder, self.described[name])
        return self.kernels[name]

    def row_norm(self, x, weight, out, eps, gain, *, before=False):
        """out = the stock row norm of x [rows, 8192]."""
        place = "none" if weight is None else "before" if before else "after"
        kernel = self.kernel(f"row_{DTYPES[x.dtype]}_{DTYPES[out.dtype]}_{place}")
        rows = x.shape[0]
        kernel(rows, x, out, x if weight is None else weight, x, x, x, rows, eps, gain, 1.0, None, None)

    def dual_norm(self, c, branch, stream, new_stream, post_weight, alpha, beta, next_weight, out):
        """new_stream and out = the stock dual norm with the flags of the DualNormConstants `c`, out of place."""
        place = "none" if not c.next_has_weight else "before" if c.next_weight_before else "after"
        kind = "tensor" if c.alpha_tensor else "float"
        kernel = self.kernel(f"dual_{c.post_weight}_{place}_{c.gate}_{kind}_{DTYPES[out.dtype]}")
        rows = branch.shape[0]
        kernel(
            rows, branch, stream, new_stream, out,
            branch if post_weight is None else post_weight, branch if next_weight is None else next_weight,
            alpha if c.alpha_tensor else beta, beta, rows,
            c.post_eps, c.next_eps, c.post_gain_center, c.next_gain_center, c.alpha, None, None,
        )  # fmt: skip
