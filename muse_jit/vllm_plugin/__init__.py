"""The vLLM plugin: persistent kernels for Muse Spark without a line of configuration.

    vLLM start ──▶ register() ──▶ (worker module imported) ──▶ weights loaded ──▶ profiling, captures ──▶ serving
                   entry point    hooks.py: two methods        start.py: after_load                start.py: when_ready
                                  of the worker are wrapped

deployment  what is read from a VllmConfig: the plan, what is asked for, what is not supported
hooks       the wrap of the worker, and how a failure becomes one warning
layers      the constant sets that a loaded model's layers need
start       after the weights are loaded: learn, have compiled, prepare, prove, replace, say so
proof       stock against ours, bit for bit, on this GPU, before anything is replaced
steps       which calls of a forward pass run through the runtime objects
newer       for a vLLM with a Muse Spark decode of its own: the same objects for its builder

`register` runs in every process of vLLM, some of which have no GPU and no model: it imports neither torch nor the
compiler and touches no driver. vLLM itself is imported here only, and only inside functions.
"""

_registered = False


def register() -> None:
    """The entry point of the group vllm.general_plugins. Safe to call in every process and more than once.

    Does nothing with MUSE_JIT_VLLM=0. Raises nothing: a failure is one warning naming its cause.
    """
    global _registered
    if _registered:
        return
    _registered = True
    from muse_jit.vllm_plugin.hooks import contained, hook_worker

    with contained("the plugin"):
        from muse_jit.settings import Settings

        if Settings.from_environ().vllm != "0":
            hook_worker()
