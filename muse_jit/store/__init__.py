"""Steps 3, 4 and 6 of the path: the cache folder shared by all processes of a host.

layout   the paths, the format versions, the modes
entry    what entry.json says
lookup   Hit or Miss with a reason; what is verified is what is handed on
lock     one builder per key
publish  one rename makes an entry appear
prune    keep the cache within bounds
listing  go through what is there, without reading artifacts
nearest  the entry that comes nearest to a key
cubin    registers and memory of the GPU code in an artifact

The contract of concurrency and durability:

 1. An entry is written once, whole, by one rename, and never changed; a reader sees all of it or none.
 2. A look-up takes no lock and writes nothing, and works on a read-only file system.
 3. What a look-up hands on was checked after it was read: size, SHA-256, and the whole stored key.
 4. Damage of any kind is a miss with a reason; the damaged folder, and no other, is moved aside by whoever rebuilds.
 5. One process at a time compiles a key on a host; it looks again after it got the lock.
 6. The lock is freed by the death of its holder; a holder that only stopped is passed by after a limit, so a key is
    compiled at most twice at once. (Where the one that took over stops, too, everybody compiles for himself.)
 7. A builder killed at any moment leaves a whole entry or none, and at most a staging folder.
 8. Files and folders are flushed before and after the rename: what was reported as published survives a crash.
 9. The folder may be deleted at any time; the next step makes it again.
10. Not promised: one compile per key across hosts on a file system without working locks (entries stay whole there,
    work may be done twice); a quick way past a dead holder where there is no flock at all (its claim holds until the
    limit); and protection against somebody with this user's or root's rights.
"""
