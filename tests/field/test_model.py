"""The store against a model: random interleavings of everything that happens to a cache, checked after every step.

A short run belongs to `make test`; `make soak` runs it for a time given by SOAK_MINUTES and says how many steps.
"""

import contextlib
import os
import pathlib
import shutil
import tempfile
import time

from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule
from support.entries import entry, key

from muse_jit.key.encoding import content_digest
from muse_jit.store.layout import Layout
from muse_jit.store.listing import listed
from muse_jit.store.lock import hold
from muse_jit.store.lookup import TO_SET_ASIDE, Hit, Miss, Reason, find, read_entry
from muse_jit.store.prune import prune
from muse_jit.store.publish import publish, set_aside

VALUES = st.integers(0, 4)
DISK_CALLS = ("mkdir", "open", "write", "fsync", "chmod", "fchmod", "rename", "utime")
steps = 0


def _artifact(value):
    return bytes([value]) * (100 + value)


class Killed(BaseException):
    """Stands for SIGKILL: nothing after it runs, no clean-up either."""


@contextlib.contextmanager
def _killed_at(number, after):
    """Within the block, the `number`-th call that changes the disk is the last; `after` lets it take effect."""
    calls, dead = [0], [False]
    real = {name: getattr(os, name) for name in DISK_CALLS}
    real_rmtree = shutil.rmtree

    def wrap(name):
        def call(*arguments, **named):
            calls[0] += 1
            if calls[0] == number and not after:
                dead[0] = True
                raise Killed
            result = real[name](*arguments, **named)
            if calls[0] == number:
                dead[0] = True
                if name == "open":
                    os.close(result)
                raise Killed
            return result

        return call

    for name in DISK_CALLS:
        setattr(os, name, wrap(name))

    shutil.rmtree = lambda *a, **n: None if dead[0] else real_rmtree(*a, **n)
    try:
        yield
    except Killed:
        pass
    finally:
        for name, function in real.items():
            setattr(os, name, function)
        shutil.rmtree = real_rmtree


class StoreMachine(RuleBasedStateMachine):
    """`whole` is what must be a hit; everything else may be a hit with the right bytes, or a miss."""

    def __init__(self):
        super().__init__()
        self.folder = tempfile.mkdtemp(prefix="muse_jit-model-")
        self.layout = Layout(os.path.join(self.folder, "cache"))
        self.whole = set()

    def teardown(self):
        shutil.rmtree(self.folder)

    def _publish(self, value, miss=None):
        if miss is not None and miss.reason in TO_SET_ASIDE:
            set_aside(self.layout, key(value).digest, miss)
        artifact = _artifact(value)
        publish(self.layout, entry(key(value), artifact), artifact)

    @rule(value=VALUES)
    def get(self, value):
        """A process asks: look up, lock, look again, publish."""
        found = find(self.layout, key(value))
        if isinstance(found, Miss):
            self.layout.create()
            with hold(self.layout, key(value).digest, "model", 1.0):
                found = find(self.layout, key(value))
                if isinstance(found, Miss):
                    self._publish(value, found)
        self.whole.add(value)

    @rule(value=VALUES, number=st.integers(1, 30), after=st.booleans())
    def get_and_be_killed(self, value, number, after):
        """The same, killed at a call that changes the disk."""
        found = find(self.layout, key(value))
        if isinstance(found, Hit):  # somebody had it removed
            shutil.rmtree(self.layout.entry(key(value).digest))
            self.whole.discard(value)
            found = Miss(Reason.ABSENT)
        with _killed_at(number, after):
            self._publish(value, found)

    @rule(value=VALUES, other=VALUES)
    def two_builders(self, value, other):
        """After a takeover, two processes publish the same key; and another one something else."""
        for v in (value, other, value):
            miss = find(self.layout, key(v))
            self._publish(v, miss if isinstance(miss, Miss) else None)
            self.whole.add(v)

    @rule(
        value=VALUES,
        name=st.sampled_from(["kernel.so", "entry.json"]),
        how=st.sampled_from(["cut", "flip", "empty", "remove", "other"]),
    )
    def damage(self, value, name, how):
        self.get(value)  # so that there is something to damage
        path = pathlib.Path(self.layout.entry(key(value).digest), name)
        data = path.read_bytes()
        if how == "remove":
            path.unlink()
        elif how == "other":
            other = (value + 1) % 5
            path.write_bytes(_artifact(other) if name == "kernel.so" else entry(key(other), _artifact(other)).to_json())
        else:
            changed = (
                {"cut": data[: len(data) // 2], "flip": bytes([data[0] ^ 1]) + data[1:], "empty": b""}[how]
                if data
                else b"x"
            )
            path.write_bytes(changed)
        self.whole.discard(value)

    @rule(keep=st.integers(0, 5))
    def prune(self, keep):
        if os.path.isdir(self.layout.root):
            sizes = {i.digest: i for i in listed(self.layout)}
            report = prune(self.layout, max_bytes=keep * 16384)
            assert not report.busy
            gone = {u.digest for u in report.removed}
            assert gone <= set(sizes)
            self.whole = {v for v in self.whole if key(v).digest not in gone}

    @rule()
    def delete_everything(self):
        shutil.rmtree(self.layout.root, ignore_errors=True)
        self.whole.clear()

    @rule(value=VALUES, stamp=st.sampled_from([0.0, 1e9, 4e9]))
    def step_the_clock(self, value, stamp):
        with contextlib.suppress(OSError):
            os.utime(os.path.join(self.layout.entry(key(value).digest), "entry.json"), (stamp, stamp))

    @rule(name=st.sampled_from(["entries-v1/stray", "staging-v1/stray", "entries-v1/ab/stray.tmp", "toolchain.json"]))
    def litter(self, name):
        path = pathlib.Path(self.layout.root, name)
        if path.parent.is_dir() and not path.exists():
            path.write_text("stray")

    @invariant()
    def hits_are_right_and_what_is_whole_is_hit(self):
        global steps
        steps += 1
        for value in range(5):
            found = find(self.layout, key(value))
            if isinstance(found, Hit):
                assert found.artifact == _artifact(value)
                assert found.entry.artifact_digest == content_digest(found.artifact)
            else:
                assert value not in self.whole, found

    @invariant()
    def there_is_no_half_entry_but_by_damage(self):
        for item in listed(self.layout):
            found = read_entry(self.layout, item.digest)
            if isinstance(found, Miss):
                assert found.reason != Reason.ABSENT
                assert all(key(v).digest != item.digest for v in self.whole)


MINUTES = float(os.environ.get("SOAK_MINUTES", "0"))
TestStore = StoreMachine.TestCase
TestStore.settings = settings(
    max_examples=100,
    stateful_step_count=30,
    deadline=None,
    suppress_health_check=list(HealthCheck),
    derandomize=not MINUTES,
)


def soak():
    """Run until the time is over; a finding raises, with the steps that led to it."""
    from hypothesis.stateful import run_state_machine_as_test

    end = time.monotonic() + 60 * MINUTES
    rounds = 0
    while time.monotonic() < end:
        run_state_machine_as_test(
            StoreMachine,
            settings=settings(
                max_examples=200,
                stateful_step_count=60,
                deadline=None,
                database=None,
                suppress_health_check=list(HealthCheck),
            ),
        )
        rounds += 1
        print(f"{rounds} rounds, {steps} steps, no finding", flush=True)


if __name__ == "__main__":
    soak()
