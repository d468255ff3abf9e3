"""The import rules of the folders, checked on every file, and what importing costs, checked in fresh processes."""

import ast
import pathlib
import subprocess
import sys

import pytest

ROOT = pathlib.Path(__file__).resolve().parent.parent
HEAVY = {"torch", "tvm_ffi", "cutlass", "cuda"}

# Folder (or file) below the root → heavy modules it may import. Everything else may import none.
ALLOWED = {
    "muse_jit/kernels": {"cutlass"},
    "muse_jit/compiler/server.py": {"cutlass"},
    "muse_jit/compiler/worker.py": {"cutlass"},
    "muse_jit/compiler/portable.py": {"cutlass"},
    "muse_jit/loader": {"tvm_ffi"},
    "muse_jit/ops": {"torch"},
    "muse_jit/vllm_plugin": {"torch"},
}

# Stage → stages of this package it may import, at any depth of the file. The path runs one way.
STAGES = {
    "constants": {"errors"},
    "key": {"errors", "constants"},
    "store": {"errors", "constants", "key"},
    "kernels": {"errors", "constants"},
    "compiler": {"errors", "spans", "constants", "key", "store", "kernels"},
    "loader": {"errors", "store", "key"},
}


def _files():
    return sorted(p for package in ("muse_jit", "cache_tools") for p in (ROOT / package).rglob("*.py"))


def _imports(path):
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: relative imports hide the stage"
            yield node.module


@pytest.mark.parametrize("path", _files(), ids=lambda p: str(p.relative_to(ROOT)))
def test_heavy_modules_only_where_they_belong(path):
    name = path.relative_to(ROOT).as_posix()
    allowed = set().union(*(mods for prefix, mods in ALLOWED.items() if name.startswith(prefix)))
    if name == "muse_jit/kernels/registry.py":
        allowed = set()
    found = {module.partition(".")[0] for module in _imports(path)} & HEAVY
    assert found <= allowed


@pytest.mark.parametrize("stage", STAGES)
def test_the_path_runs_one_way(stage):
    for path in (ROOT / "muse_jit" / stage).rglob("*.py"):
        for module in _imports(path):
            parts = module.split(".")
            if parts[0] == "muse_jit" and len(parts) > 1:
                assert parts[1] in STAGES[stage] | {stage}, f"{path.relative_to(ROOT)} imports {module}"


# What the tools may use of the package beside store and key: what a terminal, a setting and a plan are, and the two
# doors through which `verify --rebuild` compiles and `doctor` finds the linker. Neither imports the compiler here.
TOOLS_MAY = {
    "muse_jit",
    "muse_jit.console",
    "muse_jit.errors",
    "muse_jit.settings",
    "muse_jit.plan",
    "muse_jit.constants.base",
    "muse_jit.kernels.registry",
    "muse_jit.compiler.build",
    "muse_jit.compiler.link",
}


def test_cache_tools_read_through_store_and_key_only():
    for path in (ROOT / "cache_tools").rglob("*.py"):
        for module in _imports(path):
            if module.startswith("muse_jit"):
                assert module in TOOLS_MAY or module.startswith(("muse_jit.store.", "muse_jit.key.")), module


def test_the_compiler_is_called_in_one_place_of_the_tools():
    places = [p.name for p in (ROOT / "cache_tools").rglob("*.py") if "muse_jit.compiler.build" in set(_imports(p))]
    assert places == ["rebuild.py"]


def test_vllm_is_imported_by_its_plugin_only_and_only_inside_functions():
    for path in _files():
        at_any_depth = {m for m in _imports(path) if m.partition(".")[0] == "vllm"}
        name = path.relative_to(ROOT).as_posix()
        assert not at_any_depth or name.startswith("muse_jit/vllm_plugin/"), name
        top = ast.parse(path.read_text()).body
        modules = [n.module or "" for n in top if isinstance(n, ast.ImportFrom)]
        modules += [alias.name for n in top if isinstance(n, ast.Import) for alias in n.names]
        assert not any(m.partition(".")[0] == "vllm" for m in modules), name


def test_environment_is_read_in_settings_only():
    for path in _files():
        name = path.relative_to(ROOT).as_posix()
        # The console asks whether the terminal has colours (NO_COLOR, TERM), which is no setting of the package.
        if name not in ("muse_jit/settings.py", "muse_jit/compiler/process.py", "muse_jit/console.py"):
            nodes = ast.walk(ast.parse(path.read_text()))
            reads = [n.attr for n in nodes if isinstance(n, ast.Attribute) and n.attr in ("environ", "getenv")]
            assert reads == [], name


def test_disk_layout_is_written_down_once():
    for path in _files():
        name = path.relative_to(ROOT).as_posix()
        if name == "muse_jit/store/layout.py":
            continue
        tree = ast.parse(path.read_text())
        docs = {id(n.value) for n in ast.walk(tree) if isinstance(n, ast.Expr)}
        texts = [n.value for n in ast.walk(tree) if isinstance(n, ast.Constant) and id(n) not in docs]
        named = [t for t in texts if isinstance(t, str) and ("-v1" in t or t in ("kernel.so", "entry.json"))]
        assert named == [] or name == "muse_jit/compiler/build.py", f"{name} names {named}"


def _python(code, *, block=("torch", "tvm_ffi", "cutlass")):
    blocked = "".join(f"sys.modules[{name!r}] = None; " for name in block)
    done = subprocess.run(
        [sys.executable, "-c", f"import sys; {blocked}{code}"], capture_output=True, text=True, cwd=ROOT
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_importing_the_package_imports_nothing_heavy():
    out = _python(
        "import muse_jit; print(sorted(m for m in sys.modules if m.partition('.')[0] in "
        "('torch','tvm_ffi','cutlass','filelock','platformdirs','click','rich','ctypes','subprocess')))",
        block=(),
    )
    assert out.strip() == "[]"


@pytest.mark.parametrize(
    "command",
    [
        "from muse_jit.cli import main; main(['plan', '--arch', 'sm_90a'], standalone_mode=False)",
        "from cache_tools.cli import main; main(['path'], standalone_mode=False)",
        "from cache_tools.cli import main; main(['--help'], standalone_mode=False)",
        "from cache_tools.cli import main; main(['doctor'], standalone_mode=False)",
        "from cache_tools.cli import main; main(['explain', '--help'], standalone_mode=False)",
    ],
)
def test_tools_run_where_heavy_imports_fail(command):
    assert _python(command).strip()


def test_the_help_of_the_tools_imports_no_verb_and_a_listing_no_compiler_part():
    names = "sorted(m for m in sys.modules if m.startswith(('cache_tools.verbs', 'muse_jit.compiler', 'muse_jit.ops')) "
    names += "or m in ('subprocess', 'filelock', 'rich', 'asyncio', 'importlib.metadata', 'muse_jit.service'))"
    out = _python(f"from cache_tools.cli import main; main(['--help'], standalone_mode=False); print({names})")
    assert out.splitlines()[-1] == "[]"
    out = _python(f"from cache_tools.verbs import ls; print({names})")
    assert out.splitlines()[-1] == "['cache_tools.verbs', 'cache_tools.verbs.ls']"
