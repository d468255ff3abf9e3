"""The stub model (tests/support/stub_model.py) over stock's compiled kernels, and with stock's own classes.

`CubinNorms` computes with vLLM's Triton kernels as cubins (benchmarks/stock.py), which is what stock launches on this
architecture. `real_classes` takes norm and connection classes from vLLM's own common/layers.py, loaded by its path
with stand-ins for what it imports; where that file is not at hand, the stub's classes have the same attributes.
"""

import importlib.util
import pathlib
import sys
import types

import torch
from stock import DEFAULT
from support import stub_model

from muse_jit.ops.stock_layer import boundary_constants

LAYERS_FILE = DEFAULT / "vllm/models/muse_spark/common/layers.py"


class CubinNorms:
    """Stock's norms, launched as stock launches them: out of place, into fresh memory."""

    def __init__(self, stock):
        self.stock, self.constants = stock, {}

    def row_norm(self, norm, x, out_dtype):
        out = torch.empty(x.shape, dtype=out_dtype, device=x.device)
        weight = norm.weight if norm.has_weight else None
        before = norm.applies_weight_before_norm and norm.has_weight
        self.stock.row_norm(x, weight, out, norm.variance_epsilon, norm.fused_gain_center, before=before)
        return out

    def dual_norm(self, post, connection, pre, branch, stream, out_dtype):
        key = (id(post), id(connection), id(pre))
        if key not in self.constants:
            self.constants[key] = boundary_constants(post, connection, pre, order="triton-3.8", enable_pdl=False)
        out, new = torch.empty(branch.shape, dtype=out_dtype, device=branch.device), torch.empty_like(stream)
        weights = [norm.weight if norm.has_weight else None for norm in (post, pre)]
        gates = (connection.alpha, connection.beta)
        self.stock.dual_norm(self.constants[key], branch, stream, new, weights[0], *gates, weights[1], out)
        return out, new


def real_classes(norms, path=LAYERS_FILE):
    """vLLM's layers module from its file, its fused norm being that of `norms`; None where the file is not there."""
    if not pathlib.Path(path).is_file():
        return None

    def fused_rmsnorm_fwd(x, w, eps, *, out_dtype=None, gain_center=0.0, input_scale=False, use_kahan_summation=True):
        norm = types.SimpleNamespace(weight=w, has_weight=w is not None, variance_epsilon=eps,
                                     fused_gain_center=gain_center, applies_weight_before_norm=input_scale)  # fmt: skip
        return norms.row_norm(norm, x, out_dtype or x.dtype)

    stand_ins = {
        "vllm": {"_custom_ops": None},
        "vllm.model_executor": {},
        "vllm.model_executor.layers": {},
        "vllm.model_executor.layers.linear": {"ColumnParallelLinear": torch.nn.Module},
        "vllm.model_executor.layers.quantization": {"QuantizationConfig": object},
        "vllm.models": {},
        "vllm.models.muse_spark": {},
        "vllm.models.muse_spark.common": {},
        "vllm.models.muse_spark.common.ops": {},
        "vllm.models.muse_spark.common.ops.fused_rmsnorm": {"fused_rmsnorm_fwd": fused_rmsnorm_fwd},
    }
    made = {}
    for name, attributes in stand_ins.items():
        made[name] = types.ModuleType(name)
        vars(made[name]).update(attributes)
    before = {name: sys.modules.get(name) for name in made}
    sys.modules.update(made)
    try:
        spec = importlib.util.spec_from_file_location("stock_layers", path)
        module = importlib.util.module_from_spec(spec)
        sys.modules["stock_layers"] = module
        spec.loader.exec_module(module)
    finally:
        for name, old in before.items():
            sys.modules.pop(name) if old is None else sys.modules.update({name: old})
    return module


def use_real_classes(backbone, module):
    """Put real norms and connections with the same weights in the place of the stub's."""
    for owner in list(backbone.modules()):
        for name, child in list(owner.named_children()):
            if isinstance(child, stub_model.Norm):
                setattr(owner, name, _real_norm(module, child))
            elif isinstance(child, stub_model.Connection):
                real = module.MuseSpark1xNormPreservingResidualConnection(
                    dim=stub_model.H, temperature=0.3, use_stream_gate=True, channel_wise=True
                )
                real.gate = child.gate
                real.materialize_coefficients()
                setattr(owner, name, real)
    return backbone


def _real_norm(module, norm):
    cls = module.MuseSpark1xRMSNormWithInputScale if norm.applies_weight_before_norm else module.MuseSpark1xRMSNorm
    real = cls(norm.hidden_size, eps=norm.variance_epsilon, has_weight=norm.has_weight, zero_centered_gamma=True)
    if norm.has_weight:
        real.weight, real.gain_center = norm.weight, norm.fused_gain_center
    assert real.fused_gain_center == norm.fused_gain_center
    return real


def make_model(stock, layers, width_in, device="cuda"):
    """A stub model on the GPU over stock's kernels, with stock's own classes where they are at hand."""
    stub_model.NORMS = CubinNorms(stock)
    model = stub_model.Model(layers, width_in, device)
    module = real_classes(stub_model.NORMS)
    if module is not None:
        use_real_classes(model.model, module)
    return model, module is not None
