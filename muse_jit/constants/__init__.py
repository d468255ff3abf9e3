"""Step 1 of the path: frozen constant sets, one file per kernel family. The fields are the key.

base          what all have in common: exact types, identity, plain-value form
row_norm      RowNormConstants
dual_norm     DualNormConstants
small_m_gemm  SmallMGemmConstants, and GemmShape, how a GEMM is spread over the GPU
gemm_shapes   which shape a size and a bucket of rows gets: the shipped table gemm_shapes.json, else a default

Nothing is imported here: a kernel's source digest covers what it imports, and one family's constants must not make
another family recompile.
"""
