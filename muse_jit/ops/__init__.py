"""Step 8 of the path: runtime objects on torch tensors, handed to the decode builder.

device                what every object needs: the service of a device, capture guard, operand checks
context               what builders are given; which object serves which tensor parallel size
stock_order           whose order of operations stock would have in this process
stock_layer           constants read from a stock layer, by attribute names
row_norm              RowNorm
layer_front           LayerFront
dual_norm             DualNorm, standalone_dual_norm
lamport_mailbox       LamportMailbox, in which ranks hand each other their parts of a sum
all_reduce_dual_norm  AllReduceDualNorm: the all-reduce and the dual norm in one kernel
attention_boundary    AttentionBoundary, fused_all_reduce, producer_mailbox
unpooler              Unpooler, OPROJ, UNPOOLER: the package's small-M GEMM
o_projection          OProjection

Everything compiles or loads when an object is made, before any CUDA graph capture; `run` and `launch` are capturable
and allocate nothing.
"""
