"""What every runtime object needs: the service of its device, the capture guard, and checks of its operands."""

import functools

import torch

from muse_jit.errors import CompileDuringCapture
from muse_jit.key.target import arch_of_capability
from muse_jit.loader.capture import is_capturing
from muse_jit.service import JitService


def service_for(device: torch.device) -> JitService:
    """The process's kernel service for a CUDA device; devices of one architecture share it.

    Raises:
        TargetError: the device's compute capability is not supported.
    """
    return _service(arch_of_capability(torch.cuda.get_device_capability(device)))


@functools.cache
def _service(arch: str) -> JitService:
    return JitService(arch)


def pdl_supported(device: torch.device | None = None) -> bool:
    """Whether the device has programmatic dependent launch: compute capability 9.0 and later."""
    return torch.cuda.get_device_capability(device)[0] >= 9


def assert_not_capturing(what: str) -> None:
    """Raise where a CUDA graph is being captured: making `what` compiles or loads, and synchronises.

    Raises:
        CompileDuringCapture: naming the object, which must be made before the capture.
    """
    if is_capturing():
        raise CompileDuringCapture(f"{what} is being made during a CUDA graph capture; make it before the capture")


def check_operand(
    tensor: torch.Tensor,
    shape: tuple[int, ...],
    dtype: torch.dtype,
    alignment: int,
    name: str,
    device: torch.device | None = None,
) -> None:
    """Check one operand of a kernel.

    Raises:
        ValueError: naming the operand and what it must be: shape, dtype, contiguity, alignment of its first byte, and
            device where one is given.
    """
    if tensor.dtype != dtype:
        raise ValueError(f"{name} must be {dtype}, not {tensor.dtype}")
    if tuple(tensor.shape) != shape:
        raise ValueError(f"{name} must have the shape {shape}, not {tuple(tensor.shape)}")
    if not tensor.is_contiguous():
        raise ValueError(f"{name} must be contiguous, not with the strides {tensor.stride()}")
    if device is not None and tensor.device != device:
        raise ValueError(f"{name} must be on {device}, not on {tensor.device}")
    if tensor.data_ptr() % alignment:
        raise ValueError(f"{name} must be aligned to {alignment} bytes; its address ends in {tensor.data_ptr() % 256}")
