"""The fused all-reduce and boundary between GPUs: bits against stock's order on every rank, then times, in one run.

    export TORCH_SYMM_MEM_DISABLE_MULTICAST=1 NCCL_NVLS_ENABLE=0 NVSHMEM_DISABLE_NVLS=1
    torchrun --nproc-per-node N benchmarks/all_reduce.py --check 3000 --time --json FILE [--published copy|gemm]

Any number of ranks that a mailbox has (2, 4, 8, 16). Bits: CUDA graphs of all layers on one mailbox, for several row
counts, replayed in random order on new data; each rank makes every rank's data from the replay's number, adds it up in
stock's order with torch (tests/support/stock_sum.py) and runs the standalone dual norm, layer by layer. Ranks are
skewed by random sleeps of the host and of the device, before a replay and between layers; now and then up to ten
unchecked replays go before, back to back. With `--published` the consumer is
bound alone, behind a kernel that publishes from memory ("copy") or the GEMM that does ("gemm", whose results are
gathered to know what was to be added).

Times: graphs of all layers, whose replays take turns; ranks are brought together before each. Microseconds a layer,
the median over replays, of the slowest rank. The floor is a launch, one round of loads, one store to the farthest peer
until a poll there sees it, and the dual norm's two dependent sums; "our dual norm alone" is all of that but the way
between the ranks, or, with many rows and ranks, the bytes: 16 KiB a row to each peer (benchmarks/notes.md).
"""

import argparse
import json
import os
import pathlib
import platform
import random
import statistics
import sys
import time
import traceback

import torch
import torch.distributed as dist

sys.path[:0] = [
    str(pathlib.Path(__file__).resolve().parent),
    str(pathlib.Path(__file__).resolve().parents[1] / "tests"),
]

from norms import driver_version
from ranks import BOUNDARY, MOST_ROWS, NO_MULTICAST, Boundaries, H, Rank
from stock import DEFAULT, Stock, available
from support.rows import same_bits
from support.stock_sum import stock_sum
from timing import capture

CHECK_ROWS = (1, 2, 3, 8, 16, 24, 25, 33, 64)
TIME_ROWS = (1, 8, 16, 32, 64)
SKEW_CYCLES = 40_000  # about 20 us
ALIGN_CYCLES = 400_000  # about 200 us, in which the host gets a whole graph launched


# Bits


def all_partials(boundaries, rows, turn):
    """Every rank's partial sums of every layer, the same on all ranks: [rank][layers, rows, 8192]."""
    tp, device = boundaries.rank.tp, boundaries.rank.device
    made = []
    for number in range(tp):
        generator = torch.Generator(device=device).manual_seed(turn * tp + number)
        shape = (boundaries.layers, rows, H)
        partial = torch.randn(shape, generator=generator, device=device).bfloat16()
        partial[torch.rand(shape, generator=generator, device=device) < 0.01] = -0.0
        partial[:, :, number::97] *= 1e-38  # subnormals among them
        if turn % 16 == 5:  # one row of one rank is broken from some layer on
            partial[boundaries.layers // 2 :, 0, number] = float("inf") if turn % 32 == 5 else float("nan")
        made.append(partial)
    return made


def gathered_partials(boundaries, rows):
    """What the ranks' GEMMs have written."""
    mine = boundaries.partial[:, :rows].contiguous()
    everybody = [torch.empty_like(mine) for _ in range(boundaries.rank.tp)]
    dist.all_gather(everybody, mine)
    return everybody


def expected(boundaries, partials, begin):
    """(outputs of every layer, last stream): the all-reduce emulated in stock's order, the dual norm alone."""
    total, stream = stock_sum(partials, boundaries.sum_order), begin.clone()
    outs = torch.empty_like(total)
    for layer in range(boundaries.layers):
        operands = (boundaries.alpha[layer], boundaries.beta[layer], boundaries.weight[layer])
        boundaries.alone.run(total[layer], stream, None, *operands, outs[layer])
    return outs, stream


def check_graphs(boundaries):
    """Two graphs for each row count: layers back to back, and with random delays of this rank between some."""
    rank, graphs = boundaries.rank, {}

    def delay(layer):
        if rank.own.random() < 0.2:
            torch.cuda._sleep(rank.own.randrange(SKEW_CYCLES))

    for rows in CHECK_ROWS:
        for skewed in (False, True):
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph, stream=torch.cuda.Stream(), capture_error_mode="thread_local"):
                boundaries.run(rows, delay if skewed else None)
            graphs[rows, skewed] = graph
    return graphs


def one_replay(boundaries, graph, rows, turn, published):
    """Elements that differ on this rank, as a tensor."""
    rank = boundaries.rank
    generator = torch.Generator(device=rank.device).manual_seed(turn)
    begin = torch.randn(rows, H, generator=generator, device=rank.device)
    boundaries.stream[:rows] = begin
    if published == "gemm":
        boundaries.x.normal_(generator=torch.Generator(device=rank.device).manual_seed(turn * rank.tp + rank.number))
    else:
        partials = all_partials(boundaries, rows, turn)
        boundaries.partial[:, :rows] = partials[rank.number]
    if rank.own.random() < 0.3:
        torch.cuda._sleep(rank.own.randrange(50 * SKEW_CYCLES))
    if rank.own.random() < 0.2:
        time.sleep(rank.own.random() * 0.003)
    graph.replay()
    if published == "gemm":
        partials = gathered_partials(boundaries, rows)
    outs, stream = expected(boundaries, partials, begin)
    return same_bits(boundaries.out[:, :rows], outs) + same_bits(boundaries.stream[:rows], stream)


def check(boundaries, replays, published):
    """Replays in random order; raises nothing, says how many elements differed and where first."""
    rank, shared, graphs = boundaries.rank, random.Random(7), check_graphs(boundaries)
    differ, first, unchecked, by_rows = 0, None, 0, dict.fromkeys(CHECK_ROWS, 0)
    for turn in range(replays):
        for _ in range(shared.randrange(1, 11) if shared.random() < 0.1 else 0):
            graphs[shared.choice(CHECK_ROWS), shared.random() < 0.5].replay()
            unchecked += 1
        rows, skewed = shared.choice(CHECK_ROWS), shared.random() < 0.5
        found = one_replay(boundaries, graphs[rows, skewed], rows, turn, published)
        by_rows[rows] += 1
        differ += found
        if found and first is None:
            first = {"turn": turn, "rows": rows, "skewed": skewed, "elements": found}
        if turn % 100 == 99:
            boundaries.mailbox.check()
            rank.say(f"{turn + 1} replays, {differ} elements differ on rank 0")
    boundaries.mailbox.check()
    return {
        "replays": replays,
        "boundaries": replays * boundaries.layers,
        "unchecked_replays": unchecked,
        "replays_by_rows": by_rows,
        "differ": differ,
        "first": first,
    }


# Times


def symmetric_input(rank, rows):
    import torch.distributed._symmetric_memory as symmetric

    tensor = symmetric.empty((rows, H), dtype=torch.bfloat16, device=rank.device).zero_()
    symmetric.rendezvous(tensor, rank.device_group)
    return tensor


def contenders(boundaries, fused, stock, rows, published):
    """Name to a step of all layers. `fused`: boundaries that publish themselves, where `boundaries` do not.

    The other sides reduce one buffer over and over; values do not change times.
    """
    rank, layers = boundaries.rank, range(boundaries.layers)
    reduced = torch.zeros(rows, H, dtype=torch.bfloat16, device=rank.device)
    streams = [torch.zeros(rows, H, device=rank.device) for _ in range(2)]
    shared_input = symmetric_input(rank, rows)
    one_shot = torch.ops.symm_mem.one_shot_all_reduce
    group = rank.device_group.group_name

    def stock_norm(layer, partial):
        if stock is None:
            return boundaries.run_one(boundaries.alone, partial, layer, rows)
        old, new = streams[layer % 2], streams[1 - layer % 2]
        operands = (None, boundaries.alpha[layer], boundaries.beta[layer], boundaries.weight[layer])
        return stock.dual_norm(BOUNDARY, partial, old, new, *operands, boundaries.out[layer, :rows])

    def project(layer, out):
        """o_proj on cuBLAS, where the GEMM is part of what is compared."""
        if published == "gemm":
            torch.mm(boundaries.x[layer, :rows], boundaries.weights[layer].t(), out=out)

    def nccl(layer):
        project(layer, reduced)
        dist.all_reduce(reduced)
        stock_norm(layer, reduced)

    def one_shot_step(layer):
        project(layer, shared_input)
        stock_norm(layer, one_shot(shared_input, "sum", group))

    def every(call):
        return lambda: [call(layer) for layer in layers]

    steps = {
        "ours": lambda: boundaries.run(rows),
        "nccl + stock dual norm": every(nccl),
        "one_shot_all_reduce + stock dual norm": every(one_shot_step),
        "nccl alone": every(lambda layer: dist.all_reduce(reduced)),
        "one_shot_all_reduce alone": every(lambda layer: one_shot(shared_input, "sum", group)),
        "stock dual norm alone": every(lambda layer: stock_norm(layer, reduced)),
        "our dual norm alone": every(lambda layer: boundaries.run_one(boundaries.alone, reduced, layer, rows)),
    }
    if fused is not None:

        def publishes_itself(layer):
            project(layer, fused.partial[layer, :rows])
            fused.run_one(fused.bound[layer], fused.partial[layer, :rows], layer, rows)

        steps["ours, publishing itself"] = every(publishes_itself)
    return steps


def replay_times(rank, graphs, layers, replays, warm_up=5):
    """Median microseconds a layer for each graph on this rank; all ranks begin together."""
    samples = {name: [] for name in graphs}
    together = torch.zeros(1, device=rank.device)
    for turn in range(warm_up + replays):
        for name, graph in graphs.items():
            begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
            dist.all_reduce(together)
            torch.cuda._sleep(ALIGN_CYCLES)
            begin.record()
            graph.replay()
            end.record()
            end.synchronize()
            if turn >= warm_up:
                samples[name].append(begin.elapsed_time(end) * 1000 / layers)
    return {name: statistics.median(times) for name, times in samples.items()}


def times(boundaries, options, stock):
    """Row count to microseconds a layer of each contender, the slowest rank's, and the ratios that count."""
    rank, table, fused = boundaries.rank, {}, None
    if options.published is not None:
        fused = Boundaries(rank, boundaries.layers, boundaries.sum_order, None, False)
    for rows in options.rows:
        steps = contenders(boundaries, fused, stock, rows, options.published)
        graphs = {name: capture([step], "thread_local") for name, step in steps.items()}
        mine = replay_times(rank, graphs, boundaries.layers, options.replays)
        everybody = rank.gather(mine)
        row = {name: round(max(one[name] for one in everybody), 3) for name in mine}
        others = [name for name in row if name.endswith("+ stock dual norm")]
        ratios = {name: round(row["ours"] / row[name], 3) for name in others}
        table[rows] = {"microseconds": row, "ours_to": ratios}
        rank.say(f"rows {rows}:", row, ratios)
        boundaries.mailbox.check()
    return table


def versions(stock):
    return {
        "device": torch.cuda.get_device_name(),
        "driver": driver_version(),
        "torch": torch.__version__,
        "cuda": torch.version.cuda,
        "nccl": ".".join(map(str, torch.cuda.nccl.version())),
        "python": platform.python_version(),
        "stock": f"vLLM 0.33.0's dual norm, Triton {stock.triton}" if stock else "not at hand: our dual norm instead",
        "environment": NO_MULTICAST,
    }


def read_options():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", type=int, default=0, metavar="REPLAYS")
    parser.add_argument("--time", action="store_true")
    parser.add_argument("--json", type=pathlib.Path)
    parser.add_argument("--layers", type=int, default=62)
    parser.add_argument("--rows", default=",".join(map(str, TIME_ROWS)), help="row counts that are timed")
    parser.add_argument("--replays", type=int, default=60, help="replays that are timed")
    parser.add_argument("--sum-order", choices=("mnnvl", "node-local"), default="mnnvl")
    parser.add_argument("--published", choices=("copy", "gemm"), help="another kernel publishes")
    parser.add_argument("--wait-last", action="store_true", help="the consumer alone waits for the publisher last")
    parser.add_argument("--stock", type=pathlib.Path, default=DEFAULT)
    parser.add_argument("--limit", type=int, default=540, help="seconds after which a process gives up")
    options = parser.parse_args()
    options.rows = [int(rows) for rows in options.rows.split(",")]
    if not all(1 <= rows <= MOST_ROWS for rows in options.rows):
        parser.error(f"--rows must be from 1 to {MOST_ROWS}")
    return options


def main():
    options = read_options()
    rank = Rank(options.limit)
    code = 1
    try:
        with torch.no_grad():
            code = work(rank, options)
    except BaseException:  # the others wait for this rank: leave at once, with the reason
        traceback.print_exc()
        sys.stderr.flush()
        os._exit(1)
    rank.leave(code)


def work(rank, options):
    stock = Stock(options.stock) if available(options.stock) else None
    boundaries = Boundaries(rank, options.layers, options.sum_order, options.published, options.wait_last)
    boundaries.run(1)  # cuBLAS, NCCL and modules load ahead of the captures
    torch.cuda.synchronize()
    document = {
        "ranks": rank.tp, "layers": options.layers, "sum_order": options.sum_order, "published": options.published,
        "wait_last": options.wait_last, **versions(stock),
    }  # fmt: skip
    differ = 0
    if options.check:
        said = rank.gather(check(boundaries, options.check, options.published))
        differ = sum(one["differ"] for one in said)
        document["bits"] = {**said[0], "differ": differ, "first": [one["first"] for one in said]}
        rank.say("bits:", document["bits"])
    if options.time:
        document["unit"] = "microseconds a layer; median of graph replays of all layers; slowest rank"
        document["rows"] = times(boundaries, options, stock)
    if options.json and rank.number == 0:
        options.json.parent.mkdir(parents=True, exist_ok=True)
        options.json.write_text(json.dumps(document, indent=1) + "\n")
    return 1 if differ else 0


if __name__ == "__main__":
    sys.exit(main())
