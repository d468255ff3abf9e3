"""The whole path with the toy kernel: who compiles, how often, and what trouble costs."""

import builtins
import dataclasses
import hashlib
import logging
import os
import pathlib
import shlex
import threading

import pytest
from support import toy
from support.process import command, run, start

import muse_jit
from muse_jit.errors import CompileError, MissForbidden, ToolchainError, UsageError
from muse_jit.service import JitService
from muse_jit.store.lookup import Hit, Miss, Reason

pytestmark = pytest.mark.processes


def _after_warmup(command_line):
    """The arguments of a `muse-jit warmup` that a message prints, whatever variables stand before it."""
    words = shlex.split(command_line)
    return words[words.index("warmup") + 1 :]


def _service(settings, **options):
    return JitService("sm_90a", settings.with_options(**options))


def _counts(service):
    counters = service.counters
    return counters.memory_hits, counters.disk_hits, counters.compiled


@pytest.fixture
def constants(tmp_path):
    return toy.ToyConstants(value=5, count_file=str(tmp_path / "count"))


def test_compiled_then_from_memory_then_from_disk(settings, constants, tmp_path):
    service = _service(settings)
    kernel = service.get(constants)
    assert kernel() == 5
    assert service.get(dataclasses.replace(constants)) is kernel
    assert _counts(service) == (1, 0, 1)
    again = _service(settings)
    assert again.get(constants)() == 5
    assert _counts(again) == (0, 1, 0)
    assert toy.compiles(tmp_path / "count") == 1
    assert service.counters.misses == {Reason.ABSENT: 2}  # before the lock, and again inside


def test_equal_looking_constants_do_not_share_a_kernel_in_memory_or_on_disk(settings):
    service = _service(settings)
    values = (1, True, 1.0)
    with pytest.raises(ValueError, match="must be of type int exactly"):
        toy.ToyConstants(value=True)
    keys = {service.key_of(_number(v))[1].digest for v in values}
    assert len(keys) == 3
    assert len({_number(v) for v in values}) == 3


@dataclasses.dataclass(frozen=True, eq=False)
class Number(muse_jit.ConstantSet):
    value: int | float | bool


muse_jit.register_kernel("number", Number, "support.toy:build")


def _number(value):
    return Number(value=value)


def test_a_memory_hit_hashes_reads_and_locks_nothing(settings, constants, monkeypatch):
    service = _service(settings)
    kernel = service.get(constants)

    def forbidden(*arguments, **named):
        raise AssertionError("not on the hot path")

    with monkeypatch.context() as patch:
        for owner, name in ((hashlib, "sha256"), (builtins, "open"), (os, "open"), (os, "getenv"), (threading, "Lock")):
            patch.setattr(owner, name, forbidden)
        patch.setattr(type(os.environ), "__getitem__", forbidden)
        patch.setattr(service, "_state", None)
        found = service.get(constants)
    assert found is kernel


def test_threads_compile_a_key_once_and_different_keys_apart(settings, tmp_path):
    service = _service(settings)
    results = []

    def work(value):
        results.append(service.get(toy.ToyConstants(value=value, count_file=str(tmp_path / "count"), seconds=0.2))())

    threads = [threading.Thread(target=work, args=(value,)) for value in (1, 2) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(results) == [1, 1, 1, 1, 2, 2, 2, 2]
    assert toy.compiles(tmp_path / "count") == 2


RACER = """
import sys, pathlib, time
import muse_jit
from muse_jit.settings import Settings
from support import toy
service = muse_jit.JitService("sm_90a", Settings().with_options(cache_dir={cache!r}))
pathlib.Path({ready!r} + "/" + sys.argv[0] + str(__import__("os").getpid())).touch()
while not pathlib.Path({go!r}).exists(): time.sleep(0.005)
print([service.get(toy.ToyConstants(value=v, count_file={count!r}, seconds=0.3))() for v in {values!r}])
"""


def test_processes_that_start_at_once_compile_each_key_once(settings, tmp_path):
    import time

    ready, go = tmp_path / "ready", tmp_path / "go"
    ready.mkdir()
    code = RACER.format(
        cache=settings.cache_dir, ready=str(ready), go=str(go), count=str(tmp_path / "count"), values=[1, 2]
    )
    processes = [start(code, block=("cutlass", "torch")) for _ in range(6)]
    deadline = time.monotonic() + 60
    while len(list(ready.iterdir())) < 6 and time.monotonic() < deadline:
        time.sleep(0.01)
    go.touch()
    outputs = [p.communicate(timeout=120) for p in processes]
    assert [out.strip() for out, _ in outputs] == ["[1, 2]"] * 6, outputs
    assert toy.compiles(tmp_path / "count") == 2


def test_a_failure_reaches_everybody_who_waited_and_is_not_repeated(settings, tmp_path):
    import time

    ready, go = tmp_path / "ready", tmp_path / "go"
    ready.mkdir()
    code = RACER.format(
        cache=settings.cache_dir, ready=str(ready), go=str(go), count=str(tmp_path / "count"), values=[1]
    ).replace("seconds=0.3", "seconds=1.0, behaviour='error_line'")
    code = code.replace("print([", "\ntry: print([").replace("values!r}])", "")
    code += "except Exception as error: print(type(error).__name__, error)\n"
    processes = [start(code, block=("cutlass", "torch")) for _ in range(4)]
    deadline = time.monotonic() + 60
    while len(list(ready.iterdir())) < 4 and time.monotonic() < deadline:
        time.sleep(0.01)
    go.touch()
    outputs = [p.communicate(timeout=120)[0] for p in processes]
    assert all(o.startswith("CompileError toy for sm_90a") for o in outputs), outputs
    assert all("operand #0 is of the wrong kind" in o for o in outputs)
    assert toy.compiles(tmp_path / "count") == 1
    # Who asks later tries again: a failure is no cached result.
    service = _service(settings)
    with pytest.raises(CompileError):
        service.get(toy.ToyConstants(value=1, count_file=str(tmp_path / "count"), seconds=1.0, behaviour="error_line"))
    assert toy.compiles(tmp_path / "count") == 2


def test_a_failure_reaches_the_threads_that_waited(settings, tmp_path):
    service = _service(settings)
    constants = toy.ToyConstants(count_file=str(tmp_path / "count"), seconds=0.5, behaviour="fail")
    errors = []

    def work():
        try:
            service.get(constants)
        except CompileError as error:
            errors.append(str(error))

    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(errors) == 4
    assert len(set(errors)) == 1
    assert toy.compiles(tmp_path / "count") == 1


def test_strict_raises_where_the_cache_has_trouble(settings, constants):
    from muse_jit.errors import CacheUnusable

    pathlib.Path(settings.cache_dir).write_text("x")
    with pytest.raises(CacheUnusable, match=r"no lock in the cache .* \(MUSE_JIT_STRICT\)"):
        _service(settings, strict=True).get(constants)


def test_the_cache_is_pruned_to_its_size_after_the_first_publish(settings, tmp_path):
    values = [toy.ToyConstants(value=v) for v in range(3)]
    for constants in values:
        _service(settings).obtain(constants)
    last = toy.ToyConstants(value=9)
    size = 60_000  # three entries of about 17 KB each on disk fit, four do not
    _service(settings, max_bytes=size).obtain(last)
    service = _service(settings)
    found = [isinstance(service.find(c), Hit) for c in (*values, last)]
    assert found[-1]
    assert not all(found)


def test_a_hit_notes_its_use_once_a_day_and_never_in_readonly(settings, constants):
    service = _service(settings)
    service.obtain(constants)
    path = pathlib.Path(service.layout.entry(service.key_of(constants)[1].digest), "entry.json")
    os.utime(path, (1e9, 1e9))
    assert isinstance(_service(settings, mode="readonly").find(constants), Hit)
    assert path.stat().st_mtime == 1e9
    assert isinstance(service.find(constants), Hit)
    stamped = path.stat().st_mtime
    assert stamped > 1.5e9
    assert isinstance(service.find(constants), Hit)
    assert path.stat().st_mtime == stamped


def test_a_second_process_compiles_nothing_and_has_no_compiler(settings, constants, tmp_path):
    _service(settings).get(constants)
    out = run(
        "import muse_jit\nfrom support import toy\nfrom muse_jit.settings import Settings\n"
        f"s = muse_jit.JitService('sm_90a', Settings().with_options(cache_dir={settings.cache_dir!r}, mode='forbid'))\n"
        f"print(s.get(toy.ToyConstants(value=5, count_file={constants.count_file!r}))(), s.counters.disk_hits, "
        "[m for m in ('filelock', 'platformdirs', 'subprocess_') if m in sys.modules])",
        block=("cutlass",),
    )
    assert out.strip() == "5 1 []"
    assert toy.compiles(tmp_path / "count") == 1


@pytest.mark.parametrize("damage", ["kernel.so", "entry.json"])
def test_damage_is_set_aside_rebuilt_once_and_reported_once(settings, constants, tmp_path, caplog, damage):
    service = _service(settings)
    service.get(constants)
    path = pathlib.Path(service.layout.entry(service.key_of(constants)[1].digest), damage)
    path.write_bytes(b"\0" * path.stat().st_size)
    again = _service(settings)
    with caplog.at_level(logging.WARNING, "muse_jit"):
        assert again.get(constants)() == 5
    assert toy.compiles(tmp_path / "count") == 2
    assert len(caplog.records) == 1
    assert ("bad_digest" if damage == "kernel.so" else "bad_manifest") in caplog.text
    assert len(list(pathlib.Path(service.layout.root, "set-aside-v1").iterdir())) == 1
    assert _counts(again) == (0, 0, 1)
    last = _service(settings)
    assert last.get(constants)() == 5
    assert _counts(last) == (0, 1, 0)


def test_an_intact_entry_that_cannot_be_opened_is_set_aside_and_rebuilt(settings, constants, tmp_path):
    service = _service(settings)
    stored = service.obtain(constants)
    entry = stored.hit.entry
    from muse_jit.key.encoding import content_digest
    from muse_jit.store.publish import publish, set_aside

    set_aside(
        service.layout, entry.digest, Miss(Reason.REPLACED, "", os.stat(service.layout.entry(entry.digest)).st_ino)
    )
    bad = b"not a library"
    publish(
        service.layout,
        dataclasses.replace(entry, artifact_digest=content_digest(bad), artifact_size=len(bad)),
        bad,
    )
    again = _service(settings)
    assert again.get(constants)() == 5
    assert again.counters.misses[Reason.UNLOADABLE] == 1
    assert toy.compiles(tmp_path / "count") == 2
    assert isinstance(_service(settings).find(constants), Hit)


def test_a_failed_compile_keeps_its_log_and_leaves_nothing_to_hit(settings):
    service = _service(settings)
    constants = toy.ToyConstants(behaviour="error_line")
    with pytest.raises(CompileError, match=r"error: operand #0 is of the wrong kind.*; full log: ") as caught:
        service.get(constants)
    assert "noise before" in pathlib.Path(caught.value.log_path).read_text()
    assert service.find(constants) == Miss(Reason.ABSENT)
    assert service.counters.failed == 1


def test_forbid_prints_the_command_that_would_have_filled_the_cache(settings, constants, tmp_path):
    service = _service(settings, mode="forbid")
    with pytest.raises(
        MissForbidden, match=r"\(absent\) and compiling is forbidden.*env MUSE_JIT_MODE=auto muse-jit warmup"
    ) as caught:
        service.get(constants)
    assert toy.compiles(tmp_path / "count") == 0
    words = _after_warmup(str(caught.value).partition("fill it with: ")[2].partition(" [constants: ")[0])
    code, _, err = command("muse-jit", "warmup", *words, before="from support import toy")
    assert code == 0, err
    assert service.get(constants)() == 5


def test_readonly_compiles_in_memory_and_writes_nothing(settings, constants, tmp_path):
    service = _service(settings, mode="readonly")
    assert service.get(constants)() == 5
    assert not pathlib.Path(settings.cache_dir).exists()
    assert service.get(constants)() == 5
    assert toy.compiles(tmp_path / "count") == 1


def test_off_does_not_read_what_is_there(settings, constants, tmp_path):
    _service(settings).get(constants)
    service = _service(settings, mode="off")
    assert service.get(constants)() == 5
    assert toy.compiles(tmp_path / "count") == 2
    assert service.counters.misses == {Reason.DISABLED: 1}


@pytest.mark.parametrize("place", ["a file", "others can write"])
def test_an_unusable_cache_costs_a_compile_and_warnings_not_the_start(settings, constants, caplog, place):
    path = pathlib.Path(settings.cache_dir)
    if place == "a file":
        path.write_text("x")
    else:
        path.mkdir()
        path.chmod(0o777)
    service = _service(settings)
    with caplog.at_level(logging.WARNING, "muse_jit"):
        assert service.get(constants)() == 5
    assert service.counters.not_stored == 1
    assert "kernels are used from memory" in caplog.text


def test_force_replaces_an_entry(settings, constants, tmp_path):
    service = _service(settings)
    first = service.obtain(constants).hit.entry
    second = service.obtain(constants, force=True)
    assert second.status == "compiled"
    assert toy.compiles(tmp_path / "count") == 2
    stored = service.find(constants).entry
    assert stored.created == second.hit.entry.created != first.created
    assert stored.artifact_digest == first.artifact_digest


def test_two_build_functions_of_one_module_do_not_share_a_kernel(settings):
    service = _service(settings)
    _, key = service.key_of(toy.ToyConstants())
    assert dataclasses.replace(key, build="support.toy:rebuild").digest != key.digest


def test_constants_of_a_wrong_class_or_family_are_refused(settings):
    @dataclasses.dataclass(frozen=True, eq=False)
    class Stranger(muse_jit.ConstantSet):
        family = "nobody"

    with pytest.raises(UsageError, match="no kernel family 'nobody'; known: "):
        _service(settings).get(Stranger())


def test_without_a_compiler_hits_work_and_a_miss_says_what_to_run(settings, constants, monkeypatch):
    _service(settings).get(constants)
    from muse_jit.key import toolchain as toolchain_module

    monkeypatch.setattr(toolchain_module, "installed_cuda_majors", lambda path=None: ())
    service = _service(settings)
    assert service.toolchain.origin == "toolchain.json"
    assert service.get(constants)() == 5
    with pytest.raises(ToolchainError, match=r"no compiler is installed; fill it with: muse-jit warmup"):
        service.get(dataclasses.replace(constants, value=6))


def test_unrelated_environment_does_not_change_the_key(settings, constants):
    code = (
        "import muse_jit\nfrom support import toy\nfrom muse_jit.settings import Settings\n"
        "s = muse_jit.JitService('sm_90a', Settings())\n"
        f"print(s.key_of(toy.ToyConstants(value=5, count_file={constants.count_file!r}))[1].digest)"
    )
    variables = (
        {"RANK": 0},
        {"RANK": 3, "HOSTNAME": "pod-7", "PYTHONHASHSEED": 5},
        {"CUTE_DSL_LINEINFO": 1, "USER": "x"},
    )
    digests = {run(code, **v).strip() for v in variables}
    assert digests == {_service(settings).key_of(constants)[1].digest}


def test_compile_options_are_part_of_the_key_and_checked(settings, constants):
    plain = _service(settings).key_of(constants)[1]
    other = _service(settings, compile_options=(("LINEINFO", "1"),)).key_of(constants)[1]
    assert plain.digest != other.digest
    with pytest.raises(UsageError, match="compile option 'NONSENSE'"):
        _service(settings, compile_options=(("NONSENSE", "1"),))
