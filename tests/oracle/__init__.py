"""What the kernels must compute, bit by bit, without a GPU.

fp32     FP32 and BF16 arithmetic with exactly one rounding an operation
norms    the order of operations of the row norm, written once more and independently of the kernel
dual     the same for the dual norm
ptx      runs the PTX that the compiler produced, so that the order is pinned in what is shipped
"""
