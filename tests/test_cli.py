"""The commands as a person runs them: real processes, real exit codes, the real kernels of the plan."""

import json
import os
import pathlib
import signal
import subprocess
import sys
import time

import pytest
from support import toy
from support.process import ATTENTIVE, ROOT, alive, command, environment, start

pytestmark = pytest.mark.processes

HEAVY = ("torch", "tvm_ffi", "cutlass")


@pytest.fixture(scope="module")
def filled(tmp_path_factory):
    """A cache filled by the main job for sm_90a, and the report of the run that filled it."""
    cache = tmp_path_factory.mktemp("filled") / "cache"
    code, out, err = command("muse-jit", "warmup", "--arch", "sm_90a", "--tp", "8", "--json", "--cache-dir", cache)
    assert code == 0, err
    return cache, json.loads(out)


def test_first_time_everything_is_compiled(filled):
    cache, report = filled
    assert report["compiled"] == report["requested"] > 0
    assert (report["hits"], report["failed"], report["not_stored"]) == (0, 0, 0)
    assert report["cache_dir"] == str(cache)
    assert set(report) == {
        "requested", "hits", "compiled", "failed", "not_stored", "seconds", "cache_dir", "kernels", "unavailable",
        "misses", "stages",
    }  # fmt: skip
    for kernel in report["kernels"]:
        assert set(kernel) == {"digest", "kernel", "arch", "status", "compile_s", "error", "reason", "stages"}
        assert (kernel["status"], kernel["arch"], kernel["error"]) == ("compiled", "sm_90a", None)
        assert kernel["compile_s"] > 0


def test_second_time_everything_is_a_hit_with_the_compiler_blocked(filled):
    cache, first = filled
    code, out, err = command(
        "muse-jit", "warmup", "--arch", "sm_90a", "--tp", "8", "--json", "--cache-dir", cache, block=("cutlass",)
    )
    assert code == 0, err
    report = json.loads(out)
    assert report["hits"] == report["requested"] == first["requested"]
    assert [k["digest"] for k in report["kernels"]] == [k["digest"] for k in first["kernels"]]


def test_the_listing_shows_them(filled):
    cache, report = filled
    code, out, err = command("muse-cache", "ls", "--json", "--cache-dir", cache, block=HEAVY)
    assert code == 0, err
    listing = json.loads(out)
    assert {e["digest"] for e in listing["entries"]} == {k["digest"] for k in report["kernels"]}
    for entry in listing["entries"]:
        assert entry["kernel"] in {k["kernel"] for k in report["kernels"]}
        assert entry["arch"] == "sm_90a"
        assert entry["size"] > 10_000
        assert entry["compile_s"] > 0


def test_planned_kernels_have_no_spills(filled):
    cache, _ = filled
    for manifest in cache.glob("entries-v1/*/*/entry.json"):
        entry = json.loads(manifest.read_text())
        # The GEMM's block must fit an SM; the others are to leave room for a second one.
        warps = entry["key"]["constants"].get("warps")
        most = 128 if warps is None else min(255, 65536 // (32 * warps))
        for kernel in entry["resources"]:
            assert kernel["local_bytes"] == 0
            assert 0 < kernel["registers"] <= most


def test_a_fresh_process_loads_every_kernel_without_the_compiler(filled):
    cache, report = filled
    process = start(
        "import muse_jit\nfrom muse_jit.plan import Deployment, make_plan\nfrom muse_jit.settings import Settings\n"
        f"service = muse_jit.JitService('sm_90a', Settings().with_options(cache_dir={str(cache)!r}, mode='forbid'))\n"
        "kernels = [service.get(p.constants) for p in make_plan(Deployment(tp=8), ['sm_90a']).kernels]\n"
        "print(len(kernels), service.counters.disk_hits, [m for m in sys.modules if m.startswith('cutlass.')])",
        block=("cutlass",),
    )
    out, err = process.communicate(timeout=120)
    count = report["requested"]
    assert out.strip() == f"{count} {count} []", err


def test_a_kernel_is_rebuilt_byte_for_byte_from_its_entry_alone(tmp_path, filled):
    stored = [json.loads(path.read_text()) for path in filled[0].glob("entries-v1/*/*/entry.json")]
    kernels = [{"kernel": e["key"]["kernel"], "arch": "sm_90a", "constants": e["key"]["constants"]} for e in stored]
    plan = tmp_path / "plan.json"
    plan.write_text(json.dumps({"schema": 1, "kernels": kernels}))
    cache = tmp_path / "cache"
    code, out, err = command("muse-jit", "warmup", "--plan", plan, "--json", "--cache-dir", cache)
    assert code == 0, err
    assert {k["digest"] for k in json.loads(out)["kernels"]} == {e["digest"] for e in stored}
    again = [json.loads(path.read_text()) for path in cache.glob("entries-v1/*/*/entry.json")]
    assert {e["artifact_digest"] for e in again} == {e["artifact_digest"] for e in stored}


def test_a_dry_run_changes_nothing(tmp_path, filled):
    cache = tmp_path / "cache"
    code, out, _ = command("muse-jit", "warmup", "--arch", "sm_90a", "--dry-run", "--json", "--cache-dir", cache)
    assert code == 0
    assert {k["status"] for k in json.loads(out)["kernels"]} == {"planned"}
    assert not cache.exists()
    code, out, _ = command("muse-jit", "warmup", "--arch", "sm_90a", "--dry-run", "--json", "--cache-dir", filled[0])
    assert {k["status"] for k in json.loads(out)["kernels"]} == {"hit"}


def test_plan_needs_nothing_heavy_and_feeds_warmup(tmp_path, filled):
    code, out, err = command("muse-jit", "plan", "--arch", "sm_90a", "--tp", "8", block=HEAVY)
    assert code == 0, err
    plan = tmp_path / "plan.json"
    plan.write_text(out)
    code, out, err = command("muse-jit", "warmup", "--plan", plan, "--json", "--cache-dir", filled[0])
    assert code == 0, err
    assert json.loads(out)["hits"] == filled[1]["requested"]
    assert command("muse-jit", "plan", "--arch", "sm_90a", "--tp", "8", "--json")[1] == plan.read_text()


def test_plain_lines_in_a_pipe(filled):
    code, out, _ = command("muse-jit", "warmup", "--arch", "sm_90a", "--tp", "8", "--cache-dir", filled[0])
    assert code == 0
    lines = out.splitlines()
    count = filled[1]["requested"]
    assert sum(line.startswith("hit ") for line in lines) == count
    assert any(line.startswith(f"{count} kernels: {count} hit in ") for line in lines)
    assert "\x1b" not in out


@pytest.mark.parametrize(
    ("arguments", "code", "words"),
    [
        (("warmup",), 2, "name the architecture (--arch sm_90a"),
        (("warmup", "--arch", "sm_80"), 2, "allowed: sm_90a, sm_100a, sm_103a, sm_120a"),
        (("warmup", "--arch", ","), 2, "allowed: sm_90a"),
        (("warmup", "--arch", "sm_90a", "--tp", "3"), 2, "allowed: 1, 2, 4, 8, 16"),
        (("warmup", "--arch", "sm_90a", "--tp", "x"), 2, "not a valid integer"),
        (("warmup", "--arch", "sm_90a", "--only", "nope"), 2, "no kernel of family 'nope'"),
        (("warmup", "--arch", "sm_90a", "--jobs", "0"), 2, "--jobs"),
        (("warmup", "--arch", "sm_90a", "--rows", "1,x"), 2, "--rows '1,x'"),
        (("warmup", "--arch", "sm_90a", "--order", "x"), 2, "triton-3.8"),
        (("warmup", "--arch", "sm_90a", "--model", "/nowhere/config.json"), 2, "/nowhere/config.json: No such file"),
        (("warmup", "--plan", "/nowhere/plan.json"), 2, "/nowhere/plan.json: No such file"),
        (("warmup", "--plan", "p", "--tp", "8"), 2, "--plan takes the kernels from a file"),
        (("warmup", "--arch", "sm_90a", "--cache-dir", "/dev/null/x"), 3, "/dev/null/x cannot be made or written"),
        (("plan",), 2, "name the architecture"),
        (("env", "--arch", "sm_1"), 2, "allowed: sm_90a"),
        (("nonsense",), 2, "nonsense"),
        (("warmup", "--nonsense"), 2, "--nonsense"),
    ],
)
def test_wrong_use_is_one_line_and_an_exit_code(arguments, code, words):
    if arguments in (("warmup",), ("plan",)) and pathlib.Path("/dev/nvidia0").exists():
        pytest.skip("there is a device to ask here")
    got, out, err = command("muse-jit", *arguments)
    assert got == code
    assert out == ""
    assert err.count("\n") == 1
    assert err.startswith("muse-jit: ")
    assert words in err


def test_a_malformed_variable_is_named(tmp_path):
    code, _, err = command("muse-jit", "env", MUSE_JIT_MODE="sometimes")
    assert (code, err) == (2, "muse-jit: MUSE_JIT_MODE is 'sometimes'; allowed: auto, readonly, forbid, verify, off\n")


def test_a_cuda_version_that_the_compiler_does_not_load_is_refused_by_name(tmp_path):
    from muse_jit.key.toolchain import installed_cuda_majors

    newest, *older = installed_cuda_majors()
    if not older:
        pytest.skip("one CUDA flavour of the compiler is installed")
    code, out, _ = command(
        "muse-jit", "warmup", "--arch", "sm_90a", "--cuda", older[0], "--json", "--cache-dir", tmp_path / "cache"
    )
    assert code == 1
    words = f"the DSL loaded its CUDA {newest} compiler, asked for was CUDA {older[0]}"
    assert all(words in kernel["error"] for kernel in json.loads(out)["kernels"])


def _toy_plan(tmp_path, *constants):
    """A plan of toy kernels, and a folder on the path that registers them through an entry point."""
    site = tmp_path / "site"
    info = site / "toy_kernels-1.0.dist-info"
    info.mkdir(parents=True)
    (site / "toy_entry.py").write_text("def register():\n    import support.toy\n")
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: toy-kernels\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text("[muse_jit.kernels]\ntoy = toy_entry:register\n")
    kernels = [{"kernel": "toy", "arch": "sm_90a", "constants": c.as_dict()} for c in constants]
    plan = tmp_path / "plan.json"
    plan.write_text(json.dumps({"schema": 1, "kernels": kernels}))
    return plan, {"PYTHONPATH": f"{ROOT / 'tests'}{os.pathsep}{site}"}


def test_kernels_of_other_packages_come_in_by_entry_point_and_one_failure_does_not_stop_the_rest(tmp_path):
    constants = [toy.ToyConstants(value=1), toy.ToyConstants(behaviour="error_line"), toy.ToyConstants(value=3)]
    plan, variables = _toy_plan(tmp_path, *constants)
    code, out, err = command(
        "muse-jit", "warmup", "--plan", plan, "--json", "--cache-dir", tmp_path / "cache", **variables
    )
    assert code == 1, err
    report = json.loads(out)
    assert [k["status"] for k in report["kernels"]] == ["compiled", "failed", "compiled"]
    assert "error: operand #0 is of the wrong kind" in report["kernels"][1]["error"]
    assert report["failed"] == 1


def test_without_a_linker_nothing_is_published_and_one_line_says_what_to_install(tmp_path):
    plan, variables = _toy_plan(tmp_path, toy.ToyConstants())
    code, _, err = command(
        "muse-jit", "warmup", "--plan", plan, "--cache-dir", tmp_path / "cache", **variables, PATH=str(tmp_path)
    )
    assert code == 3
    assert err.count("\n") == 1
    assert "install gcc" in err
    assert not list((tmp_path / "cache").glob("entries-v1/*"))


def test_an_interrupted_warmup_ends_at_once_and_keeps_what_was_finished(tmp_path):
    count = tmp_path / "count"
    constants = [
        toy.ToyConstants(value=1, count_file=str(count)),
        toy.ToyConstants(behaviour="hang", count_file=str(count)),
    ]
    plan, variables = _toy_plan(tmp_path, *constants)
    arguments = ["warmup", "--plan", str(plan), "--cache-dir", str(tmp_path / "cache"), "--jobs", "1"]
    code = f"import sys; {ATTENTIVE}sys.argv[1:] = {arguments!r}\nfrom muse_jit.cli import entry\nentry()"
    process = subprocess.Popen(
        [sys.executable, "-c", code],
        stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environment(**variables),
    )  # fmt: skip
    deadline = time.monotonic() + 60
    while toy.compiles(count) < 2 and time.monotonic() < deadline:
        time.sleep(0.05)
    process.send_signal(signal.SIGINT)
    _, err = process.communicate(timeout=10)
    assert process.returncode == 130
    assert "interrupted; what was finished is kept" in err
    workers = [int(line.split()[0]) for line in count.read_text().splitlines()]
    time.sleep(0.5)
    assert not [w for w in workers if alive(w)]
    assert len(list((tmp_path / "cache").glob("entries-v1/*/*/entry.json"))) == 1


def test_env_says_what_and_why(tmp_path):
    code, out, err = command("muse-jit", "env", "--json", "--arch", "sm_100a", block=HEAVY, MUSE_JIT_CACHE_DIR=tmp_path)
    assert code == 0, err
    document = json.loads(out)
    assert document["target"] | {"cuda": 0} == {
        "arch": "sm_100a",
        "cuda": 0,
        "host": os.uname().machine,
        "origin": "option",
    }
    assert document["toolchain"]["origin"] == "installed"
    assert document["cache"]["root"] == str(tmp_path)
    assert document["settings"]["cache_dir"]["origin"] == "environment (MUSE_JIT_CACHE_DIR)"
    code, out, _ = command("muse-jit", "env", "--arch", "sm_100a", MUSE_JIT_CACHE_DIR=tmp_path)
    assert code == 0
    assert f"cache         {tmp_path}" in out


def test_version_and_help():
    assert command("muse-jit", "--version")[1].startswith("muse-jit, version ")
    assert "warmup" in command("muse-jit", "--help")[1]
