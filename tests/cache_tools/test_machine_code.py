"""Registers, spills and instruction mix, of made-up text and of a kernel that the compiler made."""

import json
import os
import shutil

import pytest
from support import elf, fixed
from support.process import command

from cache_tools import machine_code
from cache_tools.machine_code import CLASSES, NoDisassembler, class_of, disassembler, mixes, ptx, sass

TEXT = """
	.section	.text.first,"ax",@progbits
.text.first:
        /*0000*/                   LDC R1, c[0x0][0x37c] ;
        /*0010*/              @!P0 LDG.E R2, desc[UR4][R2.64] ;
        /*0020*/              @UP1 UIADD3 UR4, UR4, 0x1, URZ ;
        /*0030*/               { FFMA R1, R1, R2, R3 ;
        /* not an instruction */
	.section	.text.second,"ax",@progbits
        /*0000*/                   STL [R1], R2 ;
		Function : third
        /*0000*/                   HMMA.16816.F32 R4, R8, R12, R4 ;        /* 0x000000080c04723c */
                                                                           /* 0x004fe20000001804 */
"""


def test_the_mix_of_each_kernel():
    found = {m.name: dict(m.counts) for m in mixes(TEXT)}
    assert found == {"first": {"LDC": 1, "LDG": 1, "UIADD3": 1, "FFMA": 1}, "second": {"STL": 1}, "third": {"HMMA": 1}}
    assert mixes(TEXT)[0].classes == {"global memory": 1, "constants": 1, "float": 1, "integer and moves": 1}
    assert mixes("") == mixes("noise\n") == []


@pytest.mark.parametrize(
    ("mnemonic", "name"),
    [
        ("LDG", "global memory"), ("LD", "global memory"), ("LDS", "shared memory"), ("LDSM", "shared memory"),
        ("LDL", "spill"), ("STL", "spill"), ("LDC", "constants"), ("ULDC", "constants"), ("LDCU", "constants"),
        ("RED", "global memory"), ("REDUX", "shuffle and vote"), ("REDAS", "shared memory"), ("ATOMS", "shared memory"),
        ("SHF", "integer and moves"), ("SHFL", "shuffle and vote"), ("F2FP", "conversion"), ("HFMA2", "float"),
        ("BAR", "barrier and order"), ("BRA", "control"), ("LDGDEPBAR", "global memory"), ("HGMMA", "tensor"),
        ("STAS", "shared memory"), ("NEWFANGLED", "integer and moves"),
    ],
)  # fmt: skip
def test_classes(mnemonic, name):
    assert class_of(mnemonic) == name
    assert name in CLASSES


def test_no_disassembler_says_what_to_install(monkeypatch):
    monkeypatch.setattr(shutil, "which", lambda name: None)
    monkeypatch.setattr(machine_code, "_bundled", lambda name: [])
    with pytest.raises(NoDisassembler, match="no disassembler is installed; pip install nvidia-cuda-nvdisasm, or put"):
        disassembler()


@pytest.fixture
def cache(tmp_path, monkeypatch):
    fixed.stand_still(monkeypatch)
    return fixed.fill(tmp_path / "cache")


def test_without_a_disassembler_resources_are_shown_and_the_rest_is_said(cache, monkeypatch, capfd):
    monkeypatch.setattr(shutil, "which", lambda name: None)
    monkeypatch.setattr(machine_code, "_bundled", lambda name: [])
    digest = fixed.KEYS["spilling"].digest
    show = ["show", digest, "--cache-dir", cache.root]
    code, out, err = fixed.tool(monkeypatch, capfd, *show, "--resources")
    assert (code, err) == (0, "")
    assert "255         64 B" in out
    assert "instruction mix: no disassembler is installed; pip install nvidia-cuda-nvdisasm" in out
    document = json.loads(fixed.tool(monkeypatch, capfd, *show, "--resources", "--json")[1])
    assert document["instructions"] is None
    assert "nvdisasm" in document["disassembler_missing"]
    code, out, err = fixed.tool(monkeypatch, capfd, *show, "--sass")
    assert (code, out) == (1, "")
    assert err.startswith("muse-cache: no disassembler is installed")
    code, out, _ = fixed.tool(monkeypatch, capfd, "diff", digest, fixed.KEYS["plain"].digest, "--cache-dir", cache.root)
    assert code == 0
    assert "instruction mix: no disassembler" in out


@pytest.mark.parametrize("reply", ["exit 3", "echo 'nvdisasm fatal : bad cubin' >&2; exit 1"])
def test_a_disassembler_that_fails_is_one_line(cache, tmp_path, monkeypatch, capfd, reply):
    tool = tmp_path / "bin" / "nvdisasm"
    tool.parent.mkdir()
    tool.write_text(f"#!/bin/sh\n{reply}\n")
    tool.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tool.parent}:{os.environ['PATH']}")
    arguments = ["show", fixed.KEYS["plain"].digest, "--sass", "--cache-dir", cache.root]
    code, out, err = fixed.tool(monkeypatch, capfd, *arguments)
    assert (code, out) == (1, "")
    assert "nvdisasm failed: " in err
    assert err.count("\n") == 1


def test_cuobjdump_serves_where_there_is_no_nvdisasm(tmp_path, monkeypatch):
    tool = tmp_path / "cuobjdump"
    tool.write_text('#!/bin/sh\n[ "$1" = -sass ] && printf "\\t\\tFunction : k\\n /*0000*/ EXIT ;\\n"\n')
    tool.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:/bin:/usr/bin")
    monkeypatch.setattr(machine_code, "_bundled", lambda name: [])
    found = mixes(sass(elf.library("x", elf.cubin({"k": (32, 0, 0, 16)}))))
    assert [(m.name, dict(m.counts)) for m in found] == [("k", {"EXIT": 1})]


def test_a_damaged_entry_is_not_looked_into(cache, monkeypatch, capfd):
    arguments = ["show", fixed.KEYS["bad_digest"].digest, "--sass", "--cache-dir", cache.root]
    code, out, err = fixed.tool(monkeypatch, capfd, *arguments)
    assert (code, out) == (1, "")
    assert "is damaged (bad_digest: " in err


def test_ptx_that_a_library_holds():
    text = b".version 8.7\n.target sm_90a\n.address_size 64\n.visible .entry k() { ret; }\n"
    assert ptx(elf.library("x", b"\0" + text + b"\0more")) == text.decode()
    assert ptx(elf.library("x")) == ""


@pytest.fixture(scope="module")
def compiled(tmp_path_factory):
    """A cache with the two row norms of the plan, really compiled."""
    cache = tmp_path_factory.mktemp("compiled") / "cache"
    code, out, err = command(
        "muse-jit", "warmup", "--arch", "sm_90a", "--only", "row_norm", "--json", "--cache-dir", cache
    )
    assert code == 0, err
    return cache, sorted(k["digest"] for k in json.loads(out)["kernels"])


@pytest.fixture
def needs_disassembler():
    try:
        disassembler()
    except NoDisassembler as error:
        pytest.skip(str(error))


HEAVY = ("torch", "tvm_ffi", "cutlass")


@pytest.mark.processes
def test_the_code_of_a_real_kernel(compiled, needs_disassembler):
    cache, digests = compiled
    code, out, err = command(
        "muse-cache", "show", digests[0], "--resources", "--json", "--cache-dir", cache, block=HEAVY
    )
    assert code == 0, err
    document = json.loads(out)
    assert document["resources"] == document["manifest"]["resources"]
    (kernel,), (mix,) = document["resources"], document["instructions"]
    assert mix["name"] == kernel["name"]
    assert mix["total"] * 16 <= kernel["code_bytes"]
    assert mix["total"] == sum(mix["classes"].values()) == sum(mix["mnemonics"].values())
    assert "spill" not in mix["classes"]
    assert kernel["local_bytes"] == 0
    assert mix["classes"]["float"] > 0
    assert mix["mnemonics"]["LDG"] > 0
    text = command("muse-cache", "show", digests[0], "--sass", "--cache-dir", cache, block=HEAVY)[1]
    assert "EXIT" in text


@pytest.mark.processes
def test_the_difference_of_two_real_kernels(compiled, needs_disassembler):
    cache, digests = compiled
    code, out, err = command("muse-cache", "diff", *digests, "--json", "--cache-dir", cache, block=HEAVY)
    assert code == 0, err
    document = json.loads(out)
    assert [d["part"] for d in document["differences"]] == ["constants.x_fp32"]
    numbers = {n["name"]: (n["a"], n["b"]) for n in document["numbers"]}
    assert numbers["code_bytes"][0] != numbers["code_bytes"][1]
    assert numbers["instructions"][0] == sum(a for name, (a, _) in numbers.items() if name.startswith("instructions: "))


@pytest.mark.processes
def test_the_ptx_of_a_real_kernel_takes_a_rebuild(compiled):
    cache, digests = compiled
    code, out, err = command("muse-cache", "show", digests[0], "--ptx", "--cache-dir", cache, block=HEAVY)
    assert (code, out) == (1, "")
    assert "holds machine code only" in err
    assert "--ptx --rebuild" in err
    code, out, err = command("muse-cache", "show", digests[0], "--ptx", "--rebuild", "--cache-dir", cache, block=HEAVY)
    assert code == 0, err
    assert ".target sm_90a" in out
    assert ".visible .entry" in out


@pytest.mark.processes
def test_real_kernels_are_rebuilt_byte_for_byte(compiled):
    cache, digests = compiled
    code, out, err = command("muse-cache", "verify", "--rebuild", "--json", "--cache-dir", cache, block=HEAVY)
    assert code == 0, err
    assert [(e["digest"], e["rebuilt"]) for e in json.loads(out)["entries"]] == [(d, "same") for d in digests]


@pytest.mark.processes
def test_a_real_plan_is_a_hit_and_another_architecture_names_it(compiled, tmp_path):
    cache, digests = compiled
    plan = tmp_path / "plan.json"
    plan.write_text(command("muse-jit", "plan", "--arch", "sm_90a", "--only", "row_norm")[1])
    arguments = ["explain", "--plan", plan, "--json", "--cache-dir", cache]
    found = json.loads(command("muse-cache", *arguments, block=HEAVY)[1])["kernels"]
    assert sorted((k["digest"], k["status"]) for k in found) == [(d, "hit") for d in digests]
    found = json.loads(command("muse-cache", *arguments, "--arch", "sm_100a", block=HEAVY)[1])["kernels"]
    assert {k["status"] for k in found} == {"miss"}
    assert {tuple(d["part"] for d in k["differences"]) for k in found} == {("target.arch",)}
    assert {k["nearest"] for k in found} == set(digests)
