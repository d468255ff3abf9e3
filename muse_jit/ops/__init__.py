"""Step 8 of the path: runtime objects on torch tensors, handed to the decode builder.

device       what every object needs: the service of a device, capture guard, operand checks
stock_layer  constants read from a stock layer, by attribute names
row_norm     RowNorm
layer_front  LayerFront
dual_norm    DualNorm, standalone_dual_norm

Everything compiles or loads when an object is made, before any CUDA graph capture; `run` and `launch` are capturable
and allocate nothing.
"""
