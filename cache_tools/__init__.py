"""The `muse-cache` command: see, explain, check and tidy what is in the cache. Reads through `muse_jit.store`, the
production reader, and never opens what it lists as code.

cli                           the verbs, under the questions that people come with; verbs/ has a file for each
opening, select, quantities   which folder, which entries
describe, details, table      entries in words, on terminals of any width
standing, today, wanted       what is installed now, and the key that would be asked for
summary, shares               sums over a whole cache, in one pass, by several processes where it is large
explain, rebuild, library     why a key misses; compile an entry again; what a library exports
machine_code                  instructions of the cubin inside a library
health, health_machine        what `doctor` asks
report*, page*, charts, trace the page of pictures
JSON.md                       the fields of every --json
"""
