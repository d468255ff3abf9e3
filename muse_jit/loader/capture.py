"""Whether a CUDA graph is being captured on the caller's current stream.

Asked of torch where the process has imported it, for torch knows the current stream; a process without torch has no
current stream that could be asked about. Nothing is imported and the driver is not opened for it.
"""

import sys


def is_capturing() -> bool:
    """True while the current stream of this thread is capturing; then nothing may be compiled, loaded or unloaded."""
    torch = sys.modules.get("torch")
    cuda = getattr(torch, "cuda", None)
    return cuda is not None and cuda.is_initialized() and bool(cuda.is_current_stream_capturing())
