"""Step 5 of the path: the only door to `cute.compile`. It opens in another process.

worker   the process that imports the compiler, for one kernel
process  start it, wait for it, turn its end into a result or an error
link     object file to shared library
build    both together: a kernel's artifact, in memory
"""
