"""One process of a torchrun job: its groups, its model's attention boundaries, an end that cannot hang."""

import datetime
import faulthandler
import os
import random
import sys

import torch
import torch.distributed as dist

from muse_jit.ops.all_reduce_dual_norm import AllReduceDualNorm, PartialPublisher
from muse_jit.ops.dual_norm import DualNorm
from muse_jit.plan import ROWS, Deployment, attention_boundary

H = 8192
BOUNDARY = attention_boundary(Deployment(), "sm_90a")
MOST_ROWS = 64
NO_MULTICAST = {"TORCH_SYMM_MEM_DISABLE_MULTICAST": "1", "NCCL_NVLS_ENABLE": "0", "NVSHMEM_DISABLE_NVLS": "1"}
"""No multicast object may be created on the machines at hand."""


class Rank:
    """This process among the others.

    Everything is bounded: collectives by the groups' time-outs, the whole process by `limit_s`, after which it prints
    its stacks and exits.
    """

    def __init__(self, limit_s):
        for name, value in NO_MULTICAST.items():
            if os.environ.get(name) != value:
                sys.exit(f"set {' '.join(f'{n}={v}' for n, v in NO_MULTICAST.items())} in every process")
        if "LOCAL_RANK" not in os.environ:
            sys.exit("start it by torchrun --nproc-per-node N")
        faulthandler.dump_traceback_later(limit_s, exit=True)
        self.device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
        torch.cuda.set_device(self.device)
        patience = datetime.timedelta(seconds=120)
        dist.init_process_group("nccl", device_id=self.device, timeout=patience)
        self.device_group, self.cpu_group = dist.group.WORLD, dist.new_group(backend="gloo", timeout=patience)
        self.number, self.tp = dist.get_rank(), dist.get_world_size()
        self.own = random.Random(1000 + self.number)
        """Random numbers of this rank alone, for skew."""

    def say(self, *words):
        if self.number == 0:
            print(*words, flush=True)

    def gather(self, value):
        values = [None] * self.tp
        dist.all_gather_object(values, value, group=self.cpu_group)
        return values

    def leave(self, code):
        """End at once: a process group may hang at its destruction after a capture."""
        try:
            dist.barrier(group=self.cpu_group)
        finally:
            sys.stdout.flush()
            sys.stderr.flush()
            os._exit(code)


class Boundaries:
    """The attention boundaries of a model's layers on one rank: one mailbox, a set of weights and gates a layer."""

    def __init__(self, rank, layers, sum_order, published, wait_last):
        self.rank, self.layers, self.sum_order = rank, layers, sum_order
        self.shared = AllReduceDualNorm(rank.device_group, rank.cpu_group, device=rank.device, sum_order=sum_order)
        self.mailbox = self.shared.mailbox
        # Every layer binds, as AttentionBoundary does; equal constants share one kernel.
        self.bound = [
            self.shared.bind(BOUNDARY, published is not None, wait_last=wait_last and published is not None)
            for _ in range(layers)
        ]
        self.alone = DualNorm(BOUNDARY, rank.device)
        generator = torch.Generator(device=rank.device).manual_seed(11)

        def vectors(low, high, dtype):
            return (torch.rand(layers, H, generator=generator, device=rank.device) * (high - low) + low).to(dtype)

        self.alpha, self.beta = vectors(0.0316, 1.0, torch.float32), vectors(0.0, 1.0, torch.float32)
        self.weight = vectors(-0.5, 0.5, torch.bfloat16)
        self.partial = torch.zeros(layers, MOST_ROWS, H, dtype=torch.bfloat16, device=rank.device)
        self.out = torch.zeros_like(self.partial)
        self.stream = torch.zeros(MOST_ROWS, H, device=rank.device)
        self.producers = self._producers(published)

    def _producers(self, published):
        """What publishes each layer's partial sum in a kernel of its own; none where the boundary does."""
        if published is None:
            return None
        if published == "copy":
            publisher = PartialPublisher(self.bound[0].constants, self.mailbox)
            return [lambda layer, rows: publisher.run(self.partial[layer, :rows])] * self.layers
        # The publishing GEMM: o_proj of each layer, this rank's columns of it, on an input of its own.
        from muse_jit.ops.unpooler import OPROJ, Unpooler

        width, generator = H // self.rank.tp, torch.Generator(device=self.rank.device)
        generator.manual_seed(500 + self.rank.number)
        shape = (self.layers, MOST_ROWS, width)
        self.x = torch.randn(shape, generator=generator, device=self.rank.device).bfloat16()
        self.weights = [
            (torch.randn(H, width, generator=generator, device=self.rank.device) * width**-0.5).bfloat16()
            for _ in range(self.layers)
        ]
        gemms = [Unpooler(weight, self.mailbox, shape=OPROJ, rows=ROWS) for weight in self.weights]
        return [
            lambda layer, rows, gemm=gemm: gemm.run(self.x[layer, :rows], self.partial[layer, :rows]) for gemm in gemms
        ]

    def run(self, rows, before_layer=None):
        """All layers of a step, chained by the stream."""
        for layer in range(self.layers):
            if before_layer is not None:
                before_layer(layer)
            if self.producers is not None:
                self.producers[layer](layer, rows)
            self.run_one(self.bound[layer], self.partial[layer, :rows], layer, rows)

    def run_one(self, norm, partial, layer, rows):
        operands = (None, self.alpha[layer], self.beta[layer], self.weight[layer], self.out[layer, :rows])
        norm.run(partial, self.stream[:rows], *operands)
