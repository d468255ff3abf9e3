import pytest
from support.process import start

from muse_jit.compiler.slots import worker_slot
from muse_jit.store.layout import Layout

pytestmark = pytest.mark.processes

HOLDER = """
from muse_jit.compiler.slots import worker_slot
from muse_jit.store.layout import Layout
import time
with worker_slot(Layout({root!r}), {limit}, 0.0) as got:
    print(got, flush=True)
    time.sleep(60)
"""


@pytest.fixture
def layout(tmp_path):
    layout = Layout(str(tmp_path / "cache"))
    layout.create()
    return layout


def _hold(layout, limit):
    process = start(HOLDER.format(root=layout.root, limit=limit))
    assert process.stdout.readline() == "True\n"
    return process


def test_places_are_shared_by_processes_and_free_when_a_holder_dies(layout):
    holders = [_hold(layout, 2), _hold(layout, 2)]
    try:
        with worker_slot(layout, 2, 0.2) as got:
            assert not got
        with worker_slot(layout, 3, 0.2) as got:
            assert got
        holders[0].kill()
        holders[0].wait()
        with worker_slot(layout, 2, 30.0) as got:
            assert got
    finally:
        for holder in holders:
            holder.kill()
            holder.communicate()


def test_a_place_is_given_back(layout):
    for _ in range(3):
        with worker_slot(layout, 1, 0.1) as got:
            assert got
