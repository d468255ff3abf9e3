"""Which kernel families there are: name, constants class, and the text that says where the build function is.

The registry holds text, so that looking a family up imports neither the compiler nor the kernel:
`build="package.module:function"` is imported only in the worker process. The function is called as
`build(constants, target)`, sees nothing but its arguments, launches nothing, and returns what `cute.compile`
returned (or anything with `export_to_c(path, function_name=)`).

Packages can register through the entry-point group "muse_jit.kernels": the entry point names a function without
arguments that calls `register_kernel`.
"""

import dataclasses
import os
import sys

from muse_jit.constants.base import ConstantSet, field_types
from muse_jit.errors import UsageError

ENTRY_POINTS = "muse_jit.kernels"


@dataclasses.dataclass(frozen=True)
class KernelFamily:
    """One registered family."""

    name: str
    constants_class: type[ConstantSet]
    build: str


_OWN = {
    "row_norm": ("muse_jit.constants.row_norm:RowNormConstants", "muse_jit.kernels.row_norm:build"),
    "dual_norm": ("muse_jit.constants.dual_norm:DualNormConstants", "muse_jit.kernels.dual_norm:build"),
    "all_reduce_dual_norm": (
        "muse_jit.constants.all_reduce_dual_norm:AllReduceDualNormConstants",
        "muse_jit.kernels.all_reduce_dual_norm:build",
    ),
    "small_m_gemm": ("muse_jit.constants.small_m_gemm:SmallMGemmConstants", "muse_jit.kernels.small_m_gemm:build"),
}
"""This package's families; a constants class is imported when its family is asked for (2 ms each)."""

_FAMILIES: dict[str, KernelFamily] = {}
_entry_points_loaded = False


def register_kernel(name: str, constants_class: type[ConstantSet], build: str) -> KernelFamily:
    """Make a kernel family known under `name`. Registering the same again is fine.

    Raises:
        UsageError: the name is taken by another family or empty, the build text is malformed, or the constants class
            is not a frozen dataclass deriving from `ConstantSet`.
        ConstantsError: a field's annotation is outside the closed list.
    """
    if not name or not name.isprintable():
        raise UsageError(f"kernel family name {name!r}; it must be printable and not empty")
    if not (isinstance(constants_class, type) and issubclass(constants_class, ConstantSet)):
        raise UsageError(f"constants class of {name!r}: it must derive from muse_jit.ConstantSet")
    module, colon, function = build.partition(":")
    if not (colon and module and function.isidentifier()):
        raise UsageError(f'build function of {name!r} is {build!r}; it must be "module:function"')
    field_types(constants_class)
    _load_own(name)
    family = KernelFamily(name, constants_class, build)
    known = _FAMILIES.setdefault(name, family)
    if known.build != build or known.constants_class.__qualname__ != constants_class.__qualname__:
        raise UsageError(f"kernel family {name!r} is registered already, with build function {known.build}")
    constants_class.family = name
    return known


def family_named(name: str) -> KernelFamily:
    """The family registered under a name; entry points are loaded when it is not known yet.

    Raises:
        UsageError: no such family; names the known ones.
    """
    if name not in _FAMILIES:
        _load_own(name)
    if name not in _FAMILIES:
        _load_entry_points()
    try:
        return _FAMILIES[name]
    except KeyError:
        raise UsageError(f"no kernel family {name!r}; known: {', '.join(sorted({*_FAMILIES, *_OWN}))}") from None


def families() -> tuple[KernelFamily, ...]:
    """All known families, entry points included, by name."""
    for name in _OWN:
        _load_own(name)
    _load_entry_points()
    return tuple(_FAMILIES[name] for name in sorted(_FAMILIES))


def class_text(cls: type) -> str:
    """Where a class is found, as "module:Class".

    A class of the main program is named by the module that was started: its functions are imported there by name.
    """
    module = cls.__module__
    main = sys.modules["__main__"]
    if module == "__main__" and main.__spec__ is not None:
        module = main.__spec__.name.removesuffix(".__main__")
    elif module == "__main__" and getattr(main, "__file__", None):
        module = os.path.splitext(os.path.basename(str(main.__file__)))[0]
    return f"{module}:{cls.__qualname__}"


def _load_own(name: str) -> None:
    """Register a family of this package, once."""
    if name in _OWN and name not in _FAMILIES:
        import importlib

        place, build = _OWN[name]
        module, _, cls = place.partition(":")
        constants_class = getattr(importlib.import_module(module), cls)
        field_types(constants_class)
        _FAMILIES[name] = KernelFamily(name, constants_class, build)


def _load_entry_points() -> None:
    global _entry_points_loaded
    if _entry_points_loaded:
        return
    _entry_points_loaded = True
    from importlib.metadata import entry_points  # 14 ms: only when a family is not known, or all are asked for

    for point in entry_points(group=ENTRY_POINTS):
        try:
            point.load()()
        except Exception as error:
            raise UsageError(
                f"entry point {point.name!r} of group {ENTRY_POINTS} ({point.value}) failed: "
                f"{type(error).__name__}: {error}"
            ) from error
