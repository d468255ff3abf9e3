"""What a service may do now: only memory hits during a capture, no compile where the mode or the time forbids it.

Each refusal names the kernel, its constants, and the command that would have filled the cache.
"""

from muse_jit.constants.base import ConstantSet
from muse_jit.counters import Trouble
from muse_jit.errors import CompileDuringCapture, MissForbidden, ToolchainError
from muse_jit.key.target import Target
from muse_jit.key.toolchain import Toolchain
from muse_jit.loader.capture import is_capturing
from muse_jit.request import Request
from muse_jit.settings import Settings
from muse_jit.store.layout import Layout
from muse_jit.store.lookup import Miss


class Policy:
    """The refusals of one service."""

    def __init__(
        self, settings: Settings, target: Target, toolchain: Toolchain, layout: Layout, trouble: Trouble
    ) -> None:
        self.settings, self.target, self.toolchain, self.layout, self.trouble = (
            settings,
            target,
            toolchain,
            layout,
            trouble,
        )
        self.serving = False
        """Whether the engine serves; a miss is late then (MUSE_JIT_LATE_COMPILE)."""

    def guard_capture(self, constants: ConstantSet) -> None:
        """Raises `CompileDuringCapture` while the current stream is capturing: what is not in memory is too late.

        A look-up would be harmless, but what comes after it would end the capture with an error somewhere else.
        """
        if is_capturing():
            raise CompileDuringCapture(
                f"{constants.family} for {self.target} is asked for during a CUDA graph capture and is not in memory; "
                f"get it before the capture, from a cache filled with: {self._command(constants)} "
                f"[constants: {constants}]"
            )

    def may_compile(self, request: Request, miss: Miss) -> None:
        """Pass, or raise where a miss cannot or must not be compiled.

        Raises:
            MissForbidden: by the mode, or because the engine serves.
            ToolchainError: no compiler is installed.
        """
        constants = request.constants
        missing = f"{constants.family} for {self.target} is not in the cache {self.layout.root} ({miss.reason})"
        remedy = f"fill it with: {self._command(constants)} [constants: {constants}]"
        if self.settings.mode == "forbid":
            raise MissForbidden(f"{missing} and compiling is forbidden (MUSE_JIT_MODE); {remedy}")
        if self.serving and self.settings.late_compile == "error":
            raise MissForbidden(f"{missing} and the engine serves already (MUSE_JIT_LATE_COMPILE); {remedy}")
        if self.toolchain.origin != "installed":
            raise ToolchainError(f"{missing} and no compiler is installed; {remedy}")
        if self.serving and self.settings.late_compile == "warn":
            self.trouble.say(f"{missing} and is compiled while the engine serves; {remedy}")

    def _command(self, constants: ConstantSet) -> str:
        from muse_jit.remedy import warmup_command

        return warmup_command(constants, self.target, self.layout.root, self.settings)
