"""Times by CUDA graph replay: many launches in one graph, median over replays, both sides in one run."""

import statistics

import torch


def capture(calls, mode="global"):
    """A CUDA graph of the calls in order, on one stream. Everything they need must be loaded already.

    `mode`: which calls of other threads break the capture; "thread_local" beside NCCL's watchdog.
    """
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        for call in calls:
            call()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=stream, capture_error_mode=mode):
        for call in calls:
            call()
    return graph


def replay_times(graphs, calls, replays=60, warm_up=5):
    """Median microseconds a call for each graph; replays of the graphs take turns, so drift hits all alike."""
    samples = {name: [] for name in graphs}
    for turn in range(warm_up + replays):
        for name, graph in graphs.items():
            begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
            begin.record()
            graph.replay()
            end.record()
            end.synchronize()
            if turn >= warm_up:
                samples[name].append(begin.elapsed_time(end) * 1000 / calls)
    return {name: statistics.median(times) for name, times in samples.items()}
