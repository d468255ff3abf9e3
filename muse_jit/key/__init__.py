"""Step 2 of the path: constants, target, toolchain and source become one key.

encoding    canonical bytes of plain values, and the two digest types
target      GPU architecture, CUDA major, host architecture
installed   installed distributions and their file hashes
toolchain   identity of compiler and FFI, without importing them
source      digest of a kernel's module closure
options     compile options that may reach the compiler
kernel_key  the key itself
difference  which part of two keys differs
"""
