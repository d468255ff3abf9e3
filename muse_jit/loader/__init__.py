"""Step 7 of the path: a verified library becomes a callable `Kernel`, through tvm_ffi and without the compiler."""
