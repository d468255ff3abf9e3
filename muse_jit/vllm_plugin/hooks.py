"""Where the plugin gets its turn: two methods of vLLM's GPU worker, wrapped when its module is imported.

`Worker.load_model` is the last step before memory profiling, which already captures CUDA graphs; it covers both model
runners and every subclass. `Worker.compile_or_warm_up_model` is the last step before serving. The worker's module is
heavy and not every process needs it, so it is not imported here: its import is waited for.
"""

import contextlib
import functools
import importlib.abc
import importlib.machinery
import importlib.util
import logging
import sys
import types
from collections.abc import Callable, Iterator, Sequence
from typing import Any

logger = logging.getLogger("vllm.muse_jit")
"""A child of vLLM's logger, so that its lines appear with vLLM's and at vLLM's level."""

WORKER_MODULE = "vllm.v1.worker.gpu_worker"


@contextlib.contextmanager
def contained(what: str) -> Iterator[None]:
    """Turn any failure into one warning: serving goes on with stock.

    Only `Refused` passes: what an operator asked for by name and cannot have ends the start, with the reason.
    """
    try:
        yield
    except Exception as error:
        if isinstance(error, Refused):
            raise
        text = " ".join(str(error).split()) or "no message"
        logger.warning("muse_jit: %s failed and stock runs instead: %s: %s", what, type(error).__name__, text)
        logger.debug("muse_jit: %s", what, exc_info=True)


class Refused(ValueError):
    """The decode builder was asked for and this deployment cannot have it: the reason."""


def hook_worker() -> None:
    """Wrap the worker now if its module is imported, else right after its import. Twice is once."""
    module = sys.modules.get(WORKER_MODULE)
    if module is not None:
        wrap_worker(module)
    elif not any(isinstance(finder, _AfterImport) for finder in sys.meta_path):
        sys.meta_path.insert(0, _AfterImport())


class _AfterImport(importlib.abc.MetaPathFinder):
    """Finds nothing itself: lets the others find the worker's module and adds a step after its execution."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: types.ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        if fullname != WORKER_MODULE:
            return None
        with contextlib.suppress(ValueError):
            sys.meta_path.remove(self)
        spec = importlib.util.find_spec(fullname)
        loader = spec.loader if spec is not None else None
        if loader is not None:
            execute = loader.exec_module

            def exec_module(module: types.ModuleType) -> None:
                execute(module)
                with contained("hooking vLLM's worker"):
                    wrap_worker(module)

            loader.exec_module = exec_module  # type: ignore[method-assign]
        return spec


def wrap_worker(module: types.ModuleType) -> None:
    """Wrap the two methods of `module.Worker`, once.

    Raises:
        TypeError: the worker does not have them as expected; nothing is wrapped then.
    """
    worker = module.Worker
    methods = {"load_model": (_before_load, _after_load), "compile_or_warm_up_model": (_nothing, _when_ready)}
    for name in methods:
        if not callable(getattr(worker, name, None)):
            raise TypeError(f"{WORKER_MODULE}.Worker has no method {name}")
    for name, (before, after) in methods.items():
        stock = getattr(worker, name)
        if not hasattr(stock, "muse_jit_stock"):
            setattr(worker, name, _wrapped(stock, before, after))


def _wrapped(stock: Callable[..., Any], before: Callable[..., None], after: Callable[..., None]) -> Callable[..., Any]:
    @functools.wraps(stock)
    def method(self: Any, *args: Any, **kwargs: Any) -> Any:
        before(self)
        result = stock(self, *args, **kwargs)
        after(self)
        return result

    method.muse_jit_stock = stock  # type: ignore[attr-defined]
    return method


def _nothing(worker: Any) -> None:
    pass


def _before_load(worker: Any) -> None:
    with contained("the check of the deployment"):
        from muse_jit.vllm_plugin.start import before_load

        before_load(worker)


def _after_load(worker: Any) -> None:
    with contained("preparing kernels"):
        from muse_jit.vllm_plugin.start import after_load

        after_load(worker)


def _when_ready(worker: Any) -> None:
    with contained("the end of the start-up"):
        from muse_jit.vllm_plugin.start import when_ready

        when_ready(worker)
