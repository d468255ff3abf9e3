"""A kernel from outside the package: register it in a few lines, compile it once, find it again in a second process.

    python examples/own_kernel.py            compiles for sm_90a on the first run, finds it on the second
    python examples/own_kernel.py sm_100a    the same for another architecture

Neither needs a GPU. Where there is one of that architecture, the kernel also runs.
"""

import dataclasses
import sys

import muse_jit


@dataclasses.dataclass(frozen=True)
class ScaleConstants(muse_jit.ConstantSet):
    """What the kernel is specialised on. These fields are its key."""

    factor: float
    """out = factor * x."""
    threads: int = 256
    """Threads a block."""

    def validate(self) -> None:
        if self.threads not in (128, 256, 512, 1024):
            self.refuse("threads", "allowed: 128, 256, 512, 1024")


muse_jit.register_kernel("example_scale", ScaleConstants, "own_kernel:build")


def build(constants: ScaleConstants, target: muse_jit.Target):
    """Compile; called in the worker process, the only place where cutlass is imported."""
    from cutlass import Float32, cute
    from cutlass.cute.runtime import make_fake_compact_tensor, make_fake_stream

    @cute.kernel
    def scale(x: cute.Tensor, out: cute.Tensor):
        thread, _, _ = cute.arch.thread_idx()
        block, _, _ = cute.arch.block_idx()
        index = block * constants.threads + thread
        if index < x.shape[0]:
            out[index] = x[index] * constants.factor

    @cute.jit
    def launch(x: cute.Tensor, out: cute.Tensor, stream):
        blocks = cute.ceil_div(x.shape[0], constants.threads)
        scale(x, out).launch(grid=[blocks, 1, 1], block=[constants.threads, 1, 1], stream=stream)

    count = cute.sym_int()
    operands = [make_fake_compact_tensor(Float32, (count,), assumed_align=16) for _ in range(2)]
    stream = make_fake_stream(use_tvm_ffi_env_stream=True)
    return cute.compile(launch, *operands, stream, options=f"--enable-tvm-ffi --gpu-arch {target.arch}")


def main() -> None:
    arch = sys.argv[1] if len(sys.argv) > 1 else "sm_90a"
    service = muse_jit.JitService(arch=arch)
    kernel = service.get(ScaleConstants(factor=2.5))
    counters = service.counters
    print(f"{kernel}: compiled {counters.compiled}, found on disk {counters.disk_hits}")
    print(f"compiler in this process: {'cutlass' in sys.modules}")

    import torch

    if torch.cuda.is_available() and f"sm_{''.join(map(str, torch.cuda.get_device_capability()))}a" == arch:
        x = torch.randn(1000, device="cuda")
        out = torch.empty_like(x)
        kernel(x, out)
        torch.testing.assert_close(out, 2.5 * x, rtol=0, atol=0)
        print("ran on", torch.cuda.get_device_name())


if __name__ == "__main__":
    main()
