"""Start-up traces as `muse-jit warmup --trace` writes them."""

import json


def span(stage, start, seconds, pid=10, tid=10, **arguments):
    """One stage; times in seconds."""
    known = {"kernel": "row_norm", "digest": "ab" * 32, "arch": "sm_90a"}
    times = {"ts": start * 1e6, "dur": seconds * 1e6}
    return {
        "name": stage,
        "cat": "muse_jit",
        "ph": "X",
        **times,
        "pid": pid,
        "tid": tid,
        "args": {**known, **arguments},
    }


def name(kind, pid, text, tid=None):
    """What a process or thread is called."""
    return {"name": kind, "ph": "M", "pid": pid, "tid": pid if tid is None else tid, "args": {"name": text}}


def ranks(count=3):
    """A start-up of some ranks that share the compiling."""
    events = []
    for rank in range(count):
        pid, at = 100 + rank, 5.0 + 0.01 * rank
        events.append(name("process_name", pid, f"rank {rank}"))
        for kernel in range(count):
            words = {"kernel": f"kernel_{kernel}", "digest": f"{kernel:064x}"}
            stages = [("look-up", 0.001)]
            stages += [("import", 0.9), ("compile", 0.4), ("link", 0.02), ("publish", 0.005)] if kernel == rank else []
            stages += [("wait", 0.3)] if kernel > rank else []
            for stage, seconds in [*stages, ("load", 0.002)]:
                events.append(span(stage, at, seconds, pid, pid, **words))
                at += seconds
    return {"traceEvents": events, "otherData": {"version": "test"}}


def write(path, document):
    """Write a trace file; returns its path."""
    path.write_text(json.dumps(document))
    return path
