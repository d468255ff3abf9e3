"""The `muse-cache` command: see what is in the cache. Reads through `muse_jit.store`, the production reader."""
