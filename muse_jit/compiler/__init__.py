"""Step 5 of the path: the only door to `cute.compile`. It opens in another process.

build       a kernel's artifact, in memory
process     have a worker do it, turn its end into a result or an error
forkserver  this process's servers: start, ask, end
server      the process that imports the compiler once and forks the workers
worker      the process that compiles and links one kernel
portable    host code that runs on every host of its architecture
link        object file to shared library
limits      how many workers the machine bears
slots       so many for all processes of the host together
"""
