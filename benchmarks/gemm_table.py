"""Put what gemm_tune.py found into the table that the package ships.

    python benchmarks/gemm_table.py RESULT.json [RESULT.json ...] [--arch sm_90a] [--table FILE]

The fastest shape of each case replaces the table's entry for it; entries of other cases stay. A result file has
`device`, `torch` and `cases`; a case has n, k, rows, torch_mm_us and `shapes`, each with us and the fields of a launch
shape.
"""

import argparse
import json
import pathlib

from muse_jit.constants import gemm_shapes
from muse_jit.constants.gemm_shapes import Entry
from muse_jit.constants.small_m_gemm import GemmShape

TABLE = pathlib.Path(gemm_shapes.__file__).with_name(gemm_shapes.FILE)


def entries_of(result, arch):
    """The entries that a result file of gemm_tune.py comes to."""
    for case in result["cases"]:
        best = min(case["shapes"], key=lambda shape: shape["us"])
        yield Entry(
            arch=arch,
            n=case["n"],
            k=case["k"],
            rows=case["rows"],
            shape=GemmShape(**{name: best[name] for name in GemmShape._fields if name in best}),
            us=round(best["us"], 2),
            torch_mm_us=round(case["torch_mm_us"], 2),
            device=result["device"],
            torch=result["torch"],
        )


def write_table(cases, path=TABLE):
    """Write the table at `path` with these entries in the place of those for the same cases; returns their number."""
    known = gemm_shapes.read_table(path.read_text()) if path.exists() else {}
    known |= {entry.case: entry for entry in cases}
    path.write_text(gemm_shapes.table_text(known.values()))
    return len(known)


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("results", nargs="+", type=pathlib.Path)
    parser.add_argument("--arch", default="sm_90a")
    parser.add_argument("--table", type=pathlib.Path, default=TABLE)
    options = parser.parse_args()
    cases = [entry for path in options.results for entry in entries_of(json.loads(path.read_text()), options.arch)]
    print(f"{options.table}: {write_table(cases, options.table)} entries, {len(cases)} of them written now")


if __name__ == "__main__":
    main()
