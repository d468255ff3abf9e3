"""The digest of a kernel's source: the content of its module and of every module reached from it by import.

Files are read and parsed, never imported, and never asked through live functions: `inspect.getsource` of a
`@cute.jit` function changes after its first compile in a process. Modules enter by name, so a moved package keeps
its digest. Within a module comments, docstrings, blank lines and formatting do not count; everything else does.

    followed      modules of the kernel's own top-level package, muse_jit, and loose files on the path
    by RECORD     other installed distributions: one digest over all their files' hashes
    skipped       the standard library, and the toolchain (cutlass, tvm_ffi, cuda), which is a key part of its own;
                  torch and numpy, which cannot reach the generated code of a build function that sees only constants
    not seen      imports made through importlib with computed names

A module that cannot be found (an optional dependency) enters as absent: installing it later changes the digest.
"""

import ast
import contextlib
import dataclasses
import gc
import hashlib
import os
import struct
import sys
import threading
from collections.abc import Iterator
from importlib.machinery import ModuleSpec, PathFinder
from typing import Any

from muse_jit.errors import UsageError
from muse_jit.key.installed import Distribution, distributions
from muse_jit.key.memo import Memo

TOOLCHAIN = frozenset({"cutlass", "tvm_ffi", "cuda", "nvidia_cutlass_dsl"})
IGNORED = frozenset({"torch", "numpy"})
_TRIES = 20
_FIELDS: dict[type, tuple[str, ...]] = {}
_WITH_DOCSTRING = frozenset({ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef})
_CONTEXTS = frozenset({ast.Load, ast.Store, ast.Del})
_parsing = threading.Lock()


@dataclasses.dataclass(frozen=True)
class Source:
    """What was reached from one build function."""

    digest: str
    """SHA-256 over the reached modules, by name, as 64 hexadecimal digits."""
    modules: tuple[str, ...]
    """Names of the modules whose content counts, sorted."""
    outside: frozenset[str]
    """Top-level modules reached and not counted: standard library, toolchain, torch, numpy."""


def source_of(build: str, path: list[str] | None = None, also: str = "", memo: Memo | None = None) -> Source:
    """The source digest of a build function given as "module:function". `path` stands in for `sys.path`.

    `memo` knows the digests of files that were read before, by their content.

    `also`, given likewise, is a second place to start from: the class of the constants, which computes, too.

    Raises:
        UsageError: the text is malformed, or its module cannot be found or parsed.
    """
    module, colon, function = build.partition(":")
    if not (colon and module and function.isidentifier()):
        raise UsageError(f'build function {build!r}; it must be given as "module:function"')
    walk = _Walk(module.partition(".")[0], path, memo if memo is not None else Memo())
    with _no_collections():
        walk.visit(module)
        if also:
            walk.visit(also.partition(":")[0])
    if walk.content.get(module, b"absent") == b"absent":
        raise UsageError(f"the module of build function {build!r} was not found on the Python path")
    digest = hashlib.sha256()
    for name in sorted(walk.content):
        for part in (name.encode(), walk.content[name]):
            digest.update(struct.pack(">Q", len(part)) + part)
    return Source(digest.hexdigest(), tuple(sorted(walk.content)), frozenset(walk.outside))


class _Walk:
    """The closure of imports from one module; `content` maps each reached name to the digest of what it is."""

    def __init__(self, own: str, path: list[str] | None, memo: Memo) -> None:
        self.memo = memo
        self.own = {own, "muse_jit"}
        self.path = path
        self.content: dict[str, bytes] = {}
        self.outside: set[str] = set()
        self._specs: dict[str, Any] = {}
        self._finders: dict[str, Any] = {}

    def visit(self, name: str) -> None:
        """Take in a module, what it imports, and the packages around each."""
        pending = [name]
        while pending:
            pending += self._take(pending.pop())

    def _take(self, name: str) -> list[str]:
        """Enter one module into `content`; returns the names it leads to."""
        top, parent = name.partition(".")[0], name.rpartition(".")[0]
        if _outside(top):
            self.outside.add(top)
            return []
        if name in self.content:
            return []
        around = [parent] if parent else []
        if top not in self.own and (dist := _owner(top, self._spec(top))) is not None:
            self.content[top] = _distribution_digest(dist)
            return []
        spec = self._spec(name)
        if spec is None:
            self.content[name] = b"absent"
            return around
        if spec.origin is None or not spec.has_location:
            self.content[name] = b"namespace"
            return around
        digest, imports = self._read(name, spec)
        self.content[name] = digest
        return around + imports

    def _read(self, name: str, spec: Any) -> tuple[bytes, list[str]]:
        with open(spec.origin, "rb") as file:
            data = file.read()
        if not spec.origin.endswith(".py"):
            return hashlib.sha256(data).hexdigest().encode(), []
        digest, statements = self.memo.get("source", data, lambda: _parsed(data, spec.origin))
        package = name if spec.submodule_search_locations is not None else name.rpartition(".")[0]
        imports = []
        for level, module, names in statements:
            if module is None:
                imports += names
                continue
            base = _absolute(level, module, package)
            imports.append(base)
            # "from package import name" may name a module or an attribute; only a module has a spec.
            candidates = [f"{base}.{n}" for n in names if n != "*"]
            inside = [] if _outside(base.partition(".")[0]) else candidates
            imports += [n for n in inside if self._spec(n) is not None]
        return digest.encode(), imports

    def _spec(self, name: str) -> Any:
        """The import system's spec of a module, found without importing the packages around it."""
        if name not in self._specs:
            parent = name.rpartition(".")[0]
            self._specs[name] = self._below(self._spec(parent), name) if parent else self._top(name)
        return self._specs[name]

    def _top(self, name: str) -> Any:
        if self.path is not None:
            return PathFinder.find_spec(name, self.path)
        # Editable installs come in as finders of their own, beside the one for sys.path.
        finders = (f for f in sys.meta_path if hasattr(f, "find_spec"))
        return next((spec for f in finders if (spec := f.find_spec(name, None)) is not None), None)

    def _below(self, parent: Any, name: str) -> Any:
        """A submodule. `PathFinder` would ask sys.modules for the parent of a nested namespace package."""
        portions: list[str] = []
        for location in (parent.submodule_search_locations or ()) if parent is not None else ():
            if location not in self._finders:
                self._finders[location] = _path_entry_finder(location)
            finder = self._finders[location]
            spec = finder.find_spec(name) if finder is not None else None
            if spec is not None and spec.loader is not None:
                return spec
            portions += (spec.submodule_search_locations or []) if spec is not None else []
        if not portions:
            return None
        namespace = ModuleSpec(name, None, is_package=True)
        namespace.submodule_search_locations = portions
        return namespace


@contextlib.contextmanager
def _no_collections() -> Iterator[None]:
    """Syntax trees are thousands of new objects without cycles: each collection they set off looks at everything the
    process has, torch included, and finds nothing. A third of the walk's time without torch."""
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()


def _parse(data: bytes, name: str) -> ast.Module:
    """`ast.parse`, of which CPython 3.11 counts the recursion of all threads together.

    Where a finalizer lets another thread parse in the middle of it, it ends in "SystemError: AST constructor recursion
    depth mismatch". Our threads take turns; where one of somebody else's came between, it is tried again.
    """
    with _parsing:
        for _ in range(_TRIES):
            try:
                return ast.parse(data, name)
            except SystemError:
                continue
    return ast.parse(data, name)


def _path_entry_finder(location: str) -> Any:
    """A fresh finder for one folder or archive: the cached one may not have seen a file that was just written."""
    for hook in sys.path_hooks:
        try:
            return hook(location)
        except ImportError:
            continue
    return None


def _outside(top: str) -> bool:
    """Whether a top-level module is of the standard library, the toolchain, or ignored."""
    return top in sys.stdlib_module_names or top in TOOLCHAIN or top in IGNORED


def _absolute(level: int, module: str, package: str) -> str:
    if not level:
        return module
    base = package.split(".")
    base = base[: len(base) - (level - 1)]
    return ".".join(base + ([module] if module else []))


def _owner(top: str, spec: Any) -> Distribution | None:
    """The installed distribution that put a top-level module where it is; None for a loose file."""
    if spec is None:
        return None
    location = (
        spec.origin if spec.has_location and spec.origin else next(iter(spec.submodule_search_locations or ()), "")
    )
    site = os.path.dirname(os.path.dirname(location) if spec.submodule_search_locations else location)
    if not site:
        return None
    for dist in distributions(("",), [site]).values():
        recorded = dist.recorded_hashes() or {}
        if any(r == f"{top}.py" or r.startswith((f"{top}/", f"{top}.")) for r in recorded):
            return dist
    return None


def _distribution_digest(dist: Distribution) -> bytes:
    rows = sorted(f"{r} {h}" for r, h in (dist.recorded_hashes() or {}).items() if not r.startswith(".."))
    rows = [row for row in rows if ".dist-info/" not in row]
    return f"{dist.name} {hashlib.sha256(chr(10).join(rows).encode()).hexdigest()}".encode()


def _parsed(data: bytes, origin: str) -> list[Any]:
    """What counts of a source file: its digest, and its imports as [level, module, names]; module None for `import`.

    The digest is that of the syntax tree without docstrings, positions and empty fields. Empty fields are left out
    because newer Python versions add some (3.12: type_params), and a cache filled under one version must be hit under
    another.
    """
    try:
        tree = _parse(data, origin)
    except SyntaxError as error:
        raise UsageError(f"{origin}, line {error.lineno}: {error.msg}") from None
    parts: list[str] = []
    nodes: list[ast.Import | ast.ImportFrom] = []
    _append(parts, nodes, tree)
    imports = [
        [0, None, [alias.name for alias in node.names]]
        if isinstance(node, ast.Import)
        else [node.level, node.module or "", [alias.name for alias in node.names]]
        for node in nodes
    ]
    return [hashlib.sha256("\0".join(parts).encode("utf-8", "surrogatepass")).hexdigest(), imports]


def _append(parts: list[str], imports: list[Any], node: Any) -> None:
    kind = node.__class__
    if kind is list:
        parts.append(f"[{len(node)}")
        for item in node:
            _append(parts, imports, item)
        return
    fields = _FIELDS.get(kind)
    if fields is None:
        if not isinstance(node, ast.AST):
            parts.append(f"={kind.__name__} {node!r}")
            return
        fields = _FIELDS[kind] = tuple(node._fields)
    if kind is ast.Import or kind is ast.ImportFrom:
        imports.append(node)
    parts.append(f"({kind.__name__}")
    has_docstring = kind in _WITH_DOCSTRING
    for field in fields:
        value = getattr(node, field, None)
        if field == "value" and kind is ast.Constant:
            parts.append(f"={value.__class__.__name__} {value!r}")
            continue
        if field == "body" and has_docstring:
            value = _without_docstring(value)
        if value is None or value == [] or value.__class__ in _CONTEXTS:
            continue
        parts.append(field)
        if value.__class__ is str:  # a name: by far the most frequent
            parts.append(f"=str {value!r}")
        else:
            _append(parts, imports, value)
    parts.append(")")


def _without_docstring(body: Any) -> Any:
    first = body[0] if body else None
    if isinstance(first, ast.Expr) and isinstance(first.value, ast.Constant) and isinstance(first.value.value, str):
        return body[1:]
    return body


def _after_fork_in_child() -> None:
    global _parsing
    _parsing = threading.Lock()


os.register_at_fork(after_in_child=_after_fork_in_child)
