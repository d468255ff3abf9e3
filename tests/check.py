"""Size budgets, checked by `make check`. The import rules are in tests/test_imports.py, which this runs too.

Files have one idea and fit in a head; `JitService.get` and everything around it can be read aloud. Device code is
exempt from the function limit and has a longer file limit. Raise a number only with the reason in the commit.
"""

import ast
import pathlib
import subprocess
import sys

ROOT = pathlib.Path(__file__).resolve().parent.parent
FILE_LINES, DEVICE_FILE_LINES, FUNCTION_LINES = 350, 500, 60
PACKAGE_LINES = {"muse_jit": 12700, "cache_tools": 4100}
FORBIDDEN_NAMES = {"utils.py", "util.py", "common.py", "helpers.py", "helper.py", "manager.py", "misc.py"}


def problems(root: pathlib.Path = ROOT) -> list[str]:
    """One line for each budget that is overrun."""
    found = []
    for package, most in PACKAGE_LINES.items():
        total = 0
        for path in sorted((root / package).rglob("*.py")):
            name = path.relative_to(root)
            text = path.read_text()
            lines = text.count("\n")
            total += lines
            device = "kernels" in name.parts
            limit = DEVICE_FILE_LINES if device else FILE_LINES
            if lines > limit:
                found.append(f"{name}: {lines} lines, at most {limit}")
            if path.name in FORBIDDEN_NAMES:
                found.append(f"{name}: a file name that says nothing")
            for node in ast.walk(ast.parse(text)):
                if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and not device:
                    length = (node.end_lineno or node.lineno) - node.lineno + 1
                    if length > FUNCTION_LINES:
                        found.append(f"{name}:{node.lineno}: {node.name} has {length} lines, at most {FUNCTION_LINES}")
        if total > most:
            found.append(f"{package} has {total} lines, at most {most}")
    return found


def main() -> int:
    lines = problems()
    print("\n".join(lines) or "size budgets hold")
    imports = subprocess.run([sys.executable, "-m", "pytest", "-q", str(ROOT / "tests" / "test_imports.py")], cwd=ROOT)
    return 1 if lines or imports.returncode else 0


if __name__ == "__main__":
    sys.exit(main())
