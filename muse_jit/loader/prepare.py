"""Load a library's GPU code onto a device without launching anything, ahead of a CUDA graph capture.

A library loads its GPU module at its first call, and the driver loads a function at its first launch: neither may
happen during a capture. The state that the first call would set up is exported (`compiler.portable`), so the runtime's
own set-up function is called here as the first call would, and the driver is then asked for each of its functions.

All of it is the CUDA driver's C interface through ctypes: cuda-bindings need not be installed where kernels only run.
"""

import ctypes
import os
from typing import Any

from muse_jit.errors import CompileDuringCapture, LoadError
from muse_jit.key.kernel_key import STATE_SYMBOL
from muse_jit.key.target import ARCHES
from muse_jit.loader.capture import is_capturing

_MAJOR, _MINOR = 75, 76  # CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR, _MINOR
_RELAXED = 2  # CU_STREAM_CAPTURE_MODE_RELAXED


def prepare(library_path: str, symbol: str, arch: str, runtime: ctypes.CDLL, device: int) -> None:
    """Load the GPU code of an open library onto one device; doing it again is cheap.

    The device's primary context is made current meanwhile, and kept alive for the rest of the process.

    Raises:
        CompileDuringCapture: the current stream is capturing.
        LoadError: no driver or device, a device of another architecture, or a driver that refuses; names which.
    """
    if is_capturing():
        raise CompileDuringCapture("a GPU module cannot be loaded during a CUDA graph capture; prepare it before")
    driver = _Driver()
    handle = driver.device(device, arch)
    library = ctypes.CDLL(library_path, mode=os.RTLD_NOW | os.RTLD_NOLOAD)  # by its name: it is open already
    try:
        state = ctypes.c_void_p.in_dll(library, STATE_SYMBOL)
        internal = f"__cute_internal_{symbol}_"
        init, load = library[f"{internal}cuda_init"], library[f"{internal}cuda_load_to_device"]
    except (AttributeError, ValueError):
        raise LoadError(f"{symbol} does not export what prepares it; call it once before the capture instead") from None
    with driver.current(handle):
        said: list[str] = []
        tell = ctypes.CFUNCTYPE(None, ctypes.c_char_p, ctypes.c_char_p)(
            lambda kind, text: said.append((text or b"").decode("utf-8", "replace"))
        )
        if runtime.cuda_dialect_init_library_once(ctypes.byref(state), init, load, tell):
            raise LoadError(f"{symbol} cannot be loaded onto device {device}: {' '.join(said) or 'no reason given'}")
        driver.load_functions(state)


class _Driver:
    """The few functions of libcuda that are needed."""

    def __init__(self) -> None:
        try:
            self.library = ctypes.CDLL("libcuda.so.1")
        except OSError as error:
            raise LoadError(f"there is no CUDA driver on this machine: {error}") from None
        self.call("cuInit", 0)

    def call(self, name: str, *arguments: Any) -> None:
        """Call a driver function; raises `LoadError` with the driver's name for what went wrong."""
        code = self.library[name](*arguments)
        if code:
            text = ctypes.c_char_p()
            self.library.cuGetErrorName(code, ctypes.byref(text))
            raise LoadError(f"the CUDA driver refused {name}: {(text.value or b'?').decode()}")

    def device(self, number: int, arch: str) -> ctypes.c_int:
        """The handle of a device that is of the kernel's architecture."""
        handle, major, minor = ctypes.c_int(), ctypes.c_int(), ctypes.c_int()
        self.call("cuDeviceGet", ctypes.byref(handle), number)
        self.call("cuDeviceGetAttribute", ctypes.byref(major), _MAJOR, handle)
        self.call("cuDeviceGetAttribute", ctypes.byref(minor), _MINOR, handle)
        found = ARCHES.get((major.value, minor.value), f"of compute capability {major.value}.{minor.value}")
        if found != arch:
            raise LoadError(f"device {number} is {found}, the kernel was compiled for {arch}")
        return handle

    def current(self, device: ctypes.c_int) -> "_Current":
        """The device's primary context, current for the block."""
        context = ctypes.c_void_p()
        self.call("cuDevicePrimaryCtxRetain", ctypes.byref(context), device)
        return _Current(self, context)

    def load_functions(self, library: ctypes.c_void_p) -> None:
        """Have each function of a library loaded into the current context, which the driver puts off otherwise."""
        count = ctypes.c_uint()
        self.call("cuLibraryGetKernelCount", ctypes.byref(count), library)
        kernels = (ctypes.c_void_p * count.value)()
        self.call("cuLibraryEnumerateKernels", kernels, count, library)
        for kernel in kernels:
            function = ctypes.c_void_p()
            self.call("cuKernelGetFunction", ctypes.byref(function), ctypes.c_void_p(kernel))
            self.call("cuFuncLoad", function)


class _Current:
    """A context made current, in a capture mode in which loading disturbs no capture of another thread."""

    def __init__(self, driver: _Driver, context: ctypes.c_void_p) -> None:
        self.driver, self.context, self.mode = driver, context, ctypes.c_int(_RELAXED)

    def __enter__(self) -> None:
        self.driver.call("cuCtxPushCurrent_v2", self.context)
        self.driver.call("cuThreadExchangeStreamCaptureMode", ctypes.byref(self.mode))

    def __exit__(self, *error: object) -> None:
        self.driver.call("cuThreadExchangeStreamCaptureMode", ctypes.byref(self.mode))
        self.driver.call("cuCtxPopCurrent_v2", ctypes.byref(ctypes.c_void_p()))
