"""Keys that must differ (reports of kind D) and keys that must not (reports of kind E), through the whole service."""

import contextlib
import dataclasses
import importlib
import itertools
import json
import os
import pathlib
import shutil
import socket
import threading

import numpy as np
import pytest
from support import toy
from support.entries import key
from support.process import run

from muse_jit.constants.row_norm import RowNormConstants
from muse_jit.errors import CompileError, ConstantsError
from muse_jit.kernels import registry
from muse_jit.key.encoding import key_digest
from muse_jit.key.installed import distributions
from muse_jit.key.options import ALLOWED
from muse_jit.key.target import host_arch
from muse_jit.key.toolchain import Toolchain, identify
from muse_jit.service import JitService
from muse_jit.settings import Settings
from muse_jit.store import publish
from muse_jit.store.layout import Layout
from muse_jit.store.listing import listed
from muse_jit.store.lookup import Hit, Miss, Reason

pytestmark = pytest.mark.processes

ARCHES = ("sm_90a", "sm_100a", "sm_103a", "sm_120a")

KERNEL = '''
"""A kernel that returns a number made of everything it reaches."""
import dataclasses
import support.toy
from muse_jit.constants.base import ConstantSet
import {name}_helper as helper

WIDTH = 10  # lanes


@dataclasses.dataclass(frozen=True, eq=False)
class Constants(ConstantSet):
    value: int = 1


def build(constants, target, offset=0):
    """Build it."""
    return support.toy._Object(helper.number(constants.value, target.arch) * WIDTH + offset)
'''
HELPER = """
class Scale:
    factor = 2


BASES = {"sm_90a": 0, "sm_100a": 1000, "sm_103a": 2000, "sm_120a": 3000}


def number(value, arch):
    return value * Scale.factor + BASES[arch]
"""
_numbers = itertools.count()


class Project:
    """A kernel of somebody's own, in two files of a folder on the path."""

    def __init__(self, folder, monkeypatch):
        self.name = f"field_kernel_{next(_numbers)}"
        self.folder = folder
        folder.mkdir()
        self.kernel, self.helper = folder / f"{self.name}.py", folder / f"{self.name}_helper.py"
        self.kernel.write_text(KERNEL.format(name=self.name))
        self.helper.write_text(HELPER)
        monkeypatch.syspath_prepend(str(folder))
        monkeypatch.setattr(registry, "_FAMILIES", dict(registry._FAMILIES))
        constants_class = importlib.import_module(self.name).Constants
        registry.register_kernel(self.name, constants_class, f"{self.name}:build")
        self.constants = constants_class()

    def edit(self, path, old, new, keep_times=False):
        status, text = path.stat(), path.read_text()
        assert text.count(old) == 1
        path.write_text(text.replace(old, new))
        if keep_times:
            assert path.stat().st_size == status.st_size
            os.utime(path, ns=(status.st_atime_ns, status.st_mtime_ns))


@pytest.fixture
def project(tmp_path, monkeypatch):
    return Project(tmp_path / "project", monkeypatch)


def _service(settings, arch="sm_90a", **options):
    return JitService(arch, settings.with_options(**options))


def _ask(settings, constants, arch="sm_90a", **options):
    """(what the kernel returns, compiles) of a service that was just started."""
    service = _service(settings, arch, **options)
    return service.get(constants)(), service.counters.compiled


def _entries(settings):
    return {item.digest: item.entry for item in listed(Layout(settings.cache_dir))}


def _tree(root):
    paths = sorted(pathlib.Path(root).rglob("*"))
    return [(str(p), p.lstat().st_ino, p.lstat().st_mtime_ns, p.lstat().st_size) for p in paths]


# D: what must miss


def test_d1_an_edit_of_equal_size_and_time_compiles_the_edited_code(settings, project):
    """Python takes its cached byte code for fresh where size and second of the source are equal."""
    assert _ask(settings, project.constants) == (20, 1)
    project.edit(project.helper, "factor = 2", "factor = 3", keep_times=True)
    assert _ask(settings, project.constants) == (30, 1)


def test_d1_a_reinstall_with_pinned_times_compiles_the_new_code(settings, project):
    for path in (project.kernel, project.helper):
        os.utime(path, (1, 1))  # as reproducible images and archives set them
    assert _ask(settings, project.constants) == (20, 1)
    project.edit(project.kernel, "WIDTH = 10", "WIDTH = 11", keep_times=True)
    assert _ask(settings, project.constants) == (22, 1)


def test_d1_an_edit_of_equal_size_and_time_is_a_miss(settings, project):
    service = _service(settings)
    service.obtain(project.constants)
    project.edit(project.helper, "factor = 2", "factor = 3", keep_times=True)
    assert _service(settings).find(project.constants) == Miss(Reason.ABSENT)
    project.edit(project.helper, "factor = 3", "factor = 2", keep_times=True)
    assert isinstance(_service(settings).find(project.constants), Hit)


# Each makes its file longer by another count: of equal sizes in one second, see test_d1.
EDITS = {
    "a helper's function": ("helper", "value * Scale.factor", "value + Scale.factor * 4", 90),
    "a helper's class attribute": ("helper", "factor = 2", "factor = 33", 330),
    "a helper's table": ("helper", '"sm_90a": 0', '"sm_90a": 777', 7790),
    "a global": ("kernel", "WIDTH = 10", "WIDTH = 1000", 2000),
    "a default": ("kernel", "offset=0", "offset=5555", 5575),
    "the body": ("kernel", "* WIDTH + offset", "* WIDTH + offset + 4", 24),
}


def test_d7_d8_a_change_of_anything_reached_is_a_miss_and_its_return_a_hit(settings, project):
    assert _ask(settings, project.constants) == (20, 1)
    for what, (file, old, new, value) in EDITS.items():
        path = getattr(project, file)
        project.edit(path, old, new)
        assert _ask(settings, project.constants) == (value, 1), what
        project.edit(path, new, old)
        assert _ask(settings, project.constants) == (20, 0), what
    assert len(_entries(settings)) == 1 + len(EDITS)


def test_d7_a_change_of_the_constants_class_in_a_module_of_its_own_is_a_miss(settings, tmp_path, monkeypatch):
    """What the build function gets is code, too: here a property, in a file that the kernel's file does not import."""
    folder = tmp_path / "project"
    folder.mkdir()
    name = f"field_kernel_{next(_numbers)}"
    sets = folder / f"{name}_sets.py"
    sets.write_text(
        "import dataclasses\nfrom muse_jit.constants.base import ConstantSet\n"
        "@dataclasses.dataclass(frozen=True, eq=False)\nclass Constants(ConstantSet):\n    value: int = 1\n"
        "    @property\n    def scaled(self):\n        return self.value * 10\n"
    )
    (folder / f"{name}.py").write_text(
        "import support.toy\ndef build(constants, target):\n    return support.toy._Object(constants.scaled)\n"
    )
    monkeypatch.syspath_prepend(str(folder))
    monkeypatch.setattr(registry, "_FAMILIES", dict(registry._FAMILIES))
    constants_class = importlib.import_module(f"{name}_sets").Constants
    registry.register_kernel(name, constants_class, f"{name}:build")
    assert _ask(settings, constants_class()) == (10, 1)
    sets.write_text(sets.read_text().replace("* 10", "* 2000"))
    assert _ask(settings, constants_class()) == (2000, 1)


def test_d8_a_service_that_lives_through_an_edit_compiles_the_edited_code_when_asked_again(settings, project):
    service = _service(settings)
    assert service.get(project.constants)() == 20
    project.edit(project.helper, "factor = 2", "factor = 444")
    other = dataclasses.replace(project.constants, value=2)
    with contextlib.suppress(CompileError):  # "the kernel's source changed while it was compiled; ask again"
        service.get(other)
    assert service.get(other)() == 2 * 444 * 10


def _other_stack(monkeypatch, **parts):
    """Let services see another installed toolchain, which differs in `parts`."""
    real = identify

    def changed(*arguments, **named):
        found = real(*arguments, **named)
        return dataclasses.replace(found, parts={**found.parts, **parts})

    monkeypatch.setattr("muse_jit.service.identify", changed)


@pytest.mark.parametrize("part", ["version", "python", "runtime", "tvm_ffi_abi", "cuda"])
def test_d2_d12_each_part_of_the_toolchain_misses(settings, monkeypatch, part):
    constants = toy.ToyConstants(value=5)
    service = _service(settings)
    before = service.key_of(constants)[1]
    flavour = f"nvidia-cutlass-dsl-libs-cu{service.target.cuda}"
    parts = service.toolchain.parts
    if part == "cuda":
        target = dataclasses.replace(service.target, cuda=25 - service.target.cuda)
        after = dataclasses.replace(before, target=target)
    else:
        change = {"tvm_ffi_abi": "0.9/ab"} if part == "tvm_ffi_abi" else {flavour: {**parts[flavour], part: "other"}}
        _other_stack(monkeypatch, **change)
        after = _service(settings).key_of(constants)[1]
    assert after.digest != before.digest
    assert after.document["source"] == before.document["source"]


def test_d5_d6_architectures_live_side_by_side_and_are_never_mixed(settings, project):
    expected = {"sm_90a": 20, "sm_100a": 10020, "sm_103a": 20020, "sm_120a": 30020}
    assert {arch: _ask(settings, project.constants, arch) for arch in ARCHES} == {
        a: (v, 1) for a, v in expected.items()
    }
    assert {arch: _ask(settings, project.constants, arch) for arch in ARCHES} == {
        a: (v, 0) for a, v in expected.items()
    }
    assert sorted(entry.arch for entry in _entries(settings).values()) == sorted(ARCHES)


def test_d6_one_process_serves_several_architectures(settings, project):
    """Nothing about the target is kept for the process: two services of one process do not share kernels."""
    first, second = _service(settings, "sm_100a"), _service(settings, "sm_90a")
    assert (first.get(project.constants)(), second.get(project.constants)()) == (10020, 20)
    assert (second.get(project.constants)(), first.get(project.constants)()) == (20, 10020)
    for service in (first, second):
        assert service.find(project.constants).entry.key["target"]["arch"] == service.target.arch


def test_d6_an_entry_moved_to_another_architectures_place_is_rebuilt(settings, project):
    for arch in ("sm_90a", "sm_100a"):
        _service(settings, arch).obtain(project.constants)
    places = {}
    for arch in ("sm_90a", "sm_100a"):
        service = _service(settings, arch)
        places[arch] = service.layout.entry(service.key_of(project.constants)[1].digest)
    shutil.rmtree(places["sm_90a"])
    shutil.copytree(places["sm_100a"], places["sm_90a"])
    assert _service(settings).find(project.constants).reason == Reason.FOREIGN_KEY
    assert _ask(settings, project.constants) == (20, 1)
    assert _ask(settings, project.constants, "sm_100a") == (10020, 0)


def test_d9_names_are_whole_digests_and_the_stored_key_is_compared(settings):
    one, two = toy.ToyConstants(value=1), toy.ToyConstants(value=2)
    service = _service(settings)
    assert (service.get(one)(), service.get(two)()) == (1, 2)
    digests = {c: service.key_of(c)[1].digest for c in (one, two)}
    for constants, digest in digests.items():
        assert len(digest) == 64
        assert digest == key_digest(service.key_of(constants)[1].document)
        assert os.path.basename(service.layout.entry(digest)) == digest
    # The two entries change places, as under a hash that collides.
    places = [pathlib.Path(service.layout.entry(digests[c])) for c in (one, two)]
    places[0].rename(places[0].with_name("aside"))
    places[1].rename(places[0])
    places[0].with_name("aside").rename(places[1])
    fresh = _service(settings)
    assert {fresh.find(c).reason for c in (one, two)} == {Reason.FOREIGN_KEY}
    assert [_ask(settings, c) for c in (one, two)] == [(1, 1), (2, 1)]


def test_d9_a_forged_digest_field_does_not_help(settings):
    one, two = toy.ToyConstants(value=1), toy.ToyConstants(value=2)
    service = _service(settings)
    for constants in (one, two):
        service.obtain(constants)
    place = {c: pathlib.Path(service.layout.entry(service.key_of(c)[1].digest)) for c in (one, two)}
    document = json.loads((place[two] / "entry.json").read_text())
    document["digest"] = place[one].name
    (place[one] / "entry.json").write_text(json.dumps(document))
    shutil.copyfile(place[two] / "kernel.so", place[one] / "kernel.so")
    assert _service(settings).find(one).reason == Reason.BAD_MANIFEST
    assert _ask(settings, one) == (1, 1)


def test_d10_every_compile_option_and_its_value_changes_the_key(settings):
    def digest(*pairs):
        return _service(settings, compile_options=pairs).key_of(toy.ToyConstants())[1].digest

    one = {digest((name, value)) for name in ALLOWED for value in ("0", "1")}
    assert len(one | {digest()}) == 2 * len(ALLOWED) + 1
    assert digest(("DEBUG", "1"), ("LINEINFO", "1")) not in one
    assert digest(("DEBUG", "1"), ("LINEINFO", "1")) == digest(("LINEINFO", "1"), ("DEBUG", "1"))


def test_d10_an_option_set_for_one_service_is_never_answered_by_an_entry_without_it(settings):
    constants = toy.ToyConstants(value=3)
    options = {"compile_options": (("ENABLE_ASSERTIONS", "1"),)}
    assert _ask(settings, constants) == (3, 1)
    assert _ask(settings, constants, **options) == (3, 1)
    assert (_ask(settings, constants), _ask(settings, constants, **options)) == ((3, 0), (3, 0))
    assert sorted(len(e.key["options"]) for e in _entries(settings).values()) == [0, 1]


def test_d11_default_and_explicit_folder_have_one_layout(settings, tmp_path):
    constants = toy.ToyConstants(value=4)
    implicit = Settings().with_options(vllm_cache_root=str(tmp_path / "vllm"))
    explicit = Settings().with_options(cache_dir=str(tmp_path / "vllm/muse_jit"))
    assert _ask(implicit, constants) == (4, 1)
    assert _ask(explicit, constants) == (4, 0)
    assert _ask(settings, constants) == (4, 1)
    names = [sorted(p.name for p in pathlib.Path(r).iterdir()) for r in (explicit.cache_dir, settings.cache_dir)]
    assert names[0] == names[1]
    assert "entries-v1" in names[0]


def test_d11_d13_two_stacks_share_a_folder_without_deleting_each_other(settings, monkeypatch):
    constants = [toy.ToyConstants(value=value) for value in (1, 2)]
    counts = []
    for turn in range(3):
        for stack in ("first", "second"):
            with monkeypatch.context() as patch:
                if stack == "second":
                    _other_stack(patch, tvm_ffi_abi="0.9/second")
                counts.append([_ask(settings, c) for c in constants])
                if turn == 1:  # one stack replaces its own
                    _service(settings).obtain(constants[0], force=True)
    assert counts == [[(1, 1), (2, 1)]] * 2 + [[(1, 0), (2, 0)]] * 4
    entries = _entries(settings)
    assert len(entries) == 4
    assert not [e for e in entries.values() if isinstance(e, Miss)]
    records = publish.recorded_toolchains(Layout(settings.cache_dir))
    assert len({r["digest"] for r in records}) == len(records) == 2


def test_d13_two_stacks_that_are_recorded_at_once_are_both_recorded(settings, monkeypatch):
    layout = Layout(settings.cache_dir)
    layout.create()
    first, second = (Toolchain(13, "x86_64", {"tvm_ffi_abi": name}, "installed") for name in ("first", "second"))
    other = threading.Thread(target=lambda: publish.record_toolchain(layout, second, 2.0))
    real = publish.recorded_toolchains

    def reading(layout):
        records = real(layout)
        if threading.current_thread() is not other and not other.ident:
            other.start()
            other.join(2)  # it ends, or waits for a lock that is held here
        return records

    monkeypatch.setattr(publish, "recorded_toolchains", reading)
    publish.record_toolchain(layout, first, 1.0)
    other.join(30)
    assert {r["digest"] for r in real(layout)} == {first.digest, second.digest}


# E: what must hit

ENVIRONMENTS = (
    {"PYTHONHASHSEED": 0, "RANK": 0, "LOCAL_RANK": 0, "WORLD_SIZE": 8, "CUDA_VISIBLE_DEVICES": 0},
    {"PYTHONHASHSEED": 4242, "RANK": 7, "LOCAL_RANK": 7, "CUDA_VISIBLE_DEVICES": "7", "HOSTNAME": "pod-b"},
    {"VLLM_HOST_IP": "10.0.0.9", "VLLM_PORT": 51234, "MASTER_PORT": 2, "CUDA_CACHE_PATH": "/nowhere", "USER": "x"},
    {"NVIDIA_VISIBLE_DEVICES": "void", "OMP_NUM_THREADS": 1, "LD_LIBRARY_PATH": "/nowhere", "CUTE_DSL_DEBUG": 1},
)


def test_e1_e6_environment_rank_seed_and_folder_do_not_change_the_key(settings, tmp_path):
    code = (
        "import os\nos.chdir({folder!r})\nimport muse_jit\nfrom support import toy\n"
        "from muse_jit.settings import Settings\n"
        "for arch in ('sm_90a', 'sm_120a'):\n"
        "    s = muse_jit.JitService(arch, Settings.from_environ())\n"
        "    print(s.key_of(toy.ToyConstants(value=5))[1].digest)"
    )
    seen = set()
    for number, variables in enumerate(ENVIRONMENTS):
        folder = tmp_path / f"cwd {number}"
        folder.mkdir()
        seen.add(run(code.format(folder=str(folder)), **variables))
    here = [_service(settings, arch).key_of(toy.ToyConstants(value=5))[1].digest for arch in ("sm_90a", "sm_120a")]
    assert seen == {"".join(f"{digest}\n" for digest in here)}


def test_e2_the_key_does_not_depend_on_what_was_built_before(settings, project, tmp_path):
    used = _service(settings)
    for value in (1, 2, 3):
        used.obtain(toy.ToyConstants(value=value))
    used.obtain(project.constants)
    constants = toy.ToyConstants(value=4)
    late = used.obtain(constants).hit
    early = _service(settings, cache_dir=str(tmp_path / "other")).obtain(constants).hit
    assert late.entry.digest == early.entry.digest
    assert late.entry.symbol == early.entry.symbol
    assert late.artifact == early.artifact


def test_e3_e9_a_copy_of_the_project_at_another_path_and_time_hits(settings, project, tmp_path, monkeypatch):
    assert _ask(settings, project.constants) == (20, 1)
    copy = tmp_path / "another checkout"
    copy.mkdir()
    for path in (project.kernel, project.helper):
        (copy / path.name).write_text(path.read_text())
        os.utime(copy / path.name, (86400, 86400))
    shutil.rmtree(project.folder)
    monkeypatch.syspath_prepend(str(copy))
    importlib.invalidate_caches()
    assert _ask(settings, project.constants) == (20, 0)


def test_e9_comments_docstrings_and_layout_do_not_miss(settings, project):
    assert _ask(settings, project.constants) == (20, 1)
    project.edit(project.kernel, "# lanes", "# lanes of a warp, halved")
    project.edit(project.kernel, '"""Build it."""', '"""Another text."""')
    project.edit(project.helper, "class Scale:", "# moved\n\n\nclass Scale:")
    assert _ask(settings, project.constants) == (20, 0)


def test_e4_the_toolchain_through_links_and_in_another_order_is_the_same(tmp_path):
    here = identify(None, host_arch())
    site = distributions(("nvidia-cutlass-dsl",))["nvidia-cutlass-dsl"].root
    (tmp_path / "link").symlink_to(site)
    for path in ([str(tmp_path / "link")], [str(tmp_path), site], [site, str(tmp_path / "link")], [site + "/."]):
        assert identify(None, host_arch(), path=path).digest == here.digest


def test_e4_the_linkers_path_changes_neither_key_nor_bytes(settings, tmp_path, monkeypatch):
    constants = toy.ToyConstants(value=6)
    first = _service(settings).obtain(constants).hit
    tools = tmp_path / "tools"
    tools.mkdir()
    (tools / "my cc").symlink_to(shutil.which("cc"))
    monkeypatch.setenv("PATH", f"{tools}{os.pathsep}{os.environ['PATH']}")
    options = {"cc": f"'{tools / 'my cc'}'"}
    assert isinstance(_service(settings, **options).find(constants), Hit)
    other = _service(settings, cache_dir=str(tmp_path / "other"), **options).obtain(constants)
    assert (other.status, other.hit.artifact) == ("compiled", first.artifact)


@pytest.mark.parametrize("value", [np.float64(1e-5), np.float32(1e-5), np.array(1e-5), "1e-5", [1e-5], object()])
def test_e5_a_constant_that_is_no_plain_value_is_refused_by_name(value):
    with pytest.raises(ConstantsError, match=r"RowNormConstants\.eps is .*; it must be of type float exactly"):
        RowNormConstants(hidden=8192, eps=value, has_weight=False)


def test_e6_order_and_sharing_of_objects_do_not_count():
    shared = ["x", 1.5]
    one = key(constants={"a": shared, "b": shared, "c": {"d": 1, "e": 2}})
    two = key(constants={"c": {"e": 2, "d": 1}, "b": ["".join(["x"]), 3.0 / 2], "a": ["x", 1.5]})
    assert one.digest == two.digest


def test_e6_equal_sets_from_different_objects_share_one_kernel(settings):
    service = _service(settings)
    kernel = service.get(toy.ToyConstants(value=5, count_file=""))
    assert service.get(toy.ToyConstants.from_dict(json.loads(json.dumps(kernel.entry.key["constants"])))) is kernel
    assert (service.counters.compiled, service.counters.memory_hits) == (1, 1)


def test_e8_a_second_identical_call_makes_no_file_and_no_compile(settings):
    constants = toy.ToyConstants(value=5)
    service = _service(settings)
    kernel = service.get(constants)
    before = _tree(settings.cache_dir)
    assert service.get(constants) is kernel
    assert service.obtain(constants).status == "hit"
    assert _ask(settings, constants) == (5, 0)
    assert _service(settings, mode="readonly").get(constants)() == 5
    assert _tree(settings.cache_dir) == before
    assert len(_entries(settings)) == 1


def _copy_by_files(source, target):
    """As an image layer or an object store would: contents and names, nothing else."""
    for path in sorted(pathlib.Path(source).rglob("*")):
        place = target / path.relative_to(source)
        if path.is_file():
            place.parent.mkdir(parents=True, exist_ok=True)
            place.write_bytes(path.read_bytes())


def test_e3_e9_a_cache_copied_file_by_file_to_another_path_and_host_hits(settings, tmp_path, monkeypatch):
    constants = toy.ToyConstants(value=5)
    assert _ask(settings, constants) == (5, 1)
    old = os.umask(0o022)
    try:
        _copy_by_files(settings.cache_dir, tmp_path / "moved here")
    finally:
        os.umask(old)
    shutil.rmtree(settings.cache_dir)
    monkeypatch.setattr(socket, "gethostname", lambda: "another-host")
    assert _ask(settings, constants, cache_dir=str(tmp_path / "moved here"), mode="forbid") == (5, 0)


@pytest.mark.skipif(os.geteuid() != 0, reason="needs root to become another user")
@pytest.mark.parametrize("owner", ["the copier", "root"])
def test_e3_e9_a_copied_cache_hits_for_another_user(settings, tmp_path, owner):
    constants = toy.ToyConstants(value=5)
    assert _ask(settings, constants) == (5, 1)
    target = tmp_path / "copy"
    _copy_by_files(settings.cache_dir, target)
    tmp_path.chmod(0o755)
    for path in [target, *target.rglob("*")]:
        path.chmod(0o755 if path.is_dir() else 0o644)
        if owner == "the copier":
            os.chown(path, 54321, 54321)
    out = run(
        "import os, muse_jit, muse_jit.loader.kernel\nfrom support import toy\nfrom muse_jit.settings import Settings\n"
        "from muse_jit.store.lookup import find\nimport muse_jit.store.publish, muse_jit.store.prune\n"
        "from muse_jit.store.layout import Layout\n"
        f"s = muse_jit.JitService('sm_90a', Settings().with_options(cache_dir={settings.cache_dir!r}, mode='forbid'))\n"
        "key = s.key_of(toy.ToyConstants(value=5))[1]\n"
        f"folder = os.open({str(tmp_path)!r}, os.O_RDONLY)\n"
        "os.fchdir(folder)\n"  # the folders above may be closed to other users
        "os.setgroups([]); os.setgid(54321); os.setuid(54321)\n"
        "found = find(Layout('copy'), key)\n"
        "print(type(found).__name__, getattr(found, 'reason', ''), os.geteuid())"
    )
    assert out.split() == ["Hit", "54321"]
