"""Why three generations: every interleaving of a few steps of two ranks, as a model of one row of a mailbox.

A rank publishes step s, consumes it, re-arms what it read, and goes on. Stores to the other rank arrive at any time and
in any order. The model follows all schedules; it is wrong if a store meets a slot that is not armed, if what is read is
not of the step, if a re-arming erases what it has not read, or if nobody can go on.
"""

import pytest

from muse_jit.constants.mailbox import GENERATIONS

STEPS = 7
Slots = tuple[int | None, ...]


class Wrong(Exception):
    pass


def follow(generations, slack):
    """Every reachable state. `slack`: how many steps a re-arming may still be under way when a rank publishes."""
    start = tuple((0, "publish", (None,) * generations, frozenset(), frozenset()) for _ in range(2))
    seen, todo = {start}, [start]
    while todo:
        state = todo.pop()
        following = list(moves(state, generations, slack))
        if not following and any(step < STEPS for step, *_ in state):
            raise Wrong("nobody can go on")
        for after in following:
            if after not in seen:
                seen.add(after)
                todo.append(after)
    return len(seen)


def moves(state, generations, slack):
    """States one move later. Of a rank: step, what is next, the peer's slots, stores on their way to them, re-armings
    under way."""
    for rank in (0, 1):
        step, what, slots, arriving, rearming = state[rank]

        def here(*changed, rank=rank):
            return tuple(changed if r == rank else state[r] for r in (0, 1))

        for store in arriving:
            place = store % generations
            if slots[place] is not None:
                raise Wrong("a store meets a slot that is not armed")
            yield here(step, what, put(slots, place, store), arriving - {store}, rearming)
        for read in rearming:
            place = read % generations
            if slots[place] != read:
                raise Wrong("a re-arming erases what was not read")
            yield here(step, what, put(slots, place, None), arriving, rearming - {read})
        if step == STEPS:
            continue
        if what == "publish" and all(read >= step - slack for read in rearming):
            other = state[1 - rank]
            told = (*other[:3], other[3] | {step}, other[4])
            mine = (step, "consume", slots, arriving, rearming)
            yield (mine, told) if rank == 0 else (told, mine)
        if what == "consume" and slots[step % generations] is not None:
            if slots[step % generations] != step:
                raise Wrong("what is read is of another step")
            yield here(step + 1, "publish", slots, arriving, rearming | {step})


def put(slots, place, value):
    return (*slots[:place], value, *slots[place + 1 :])


def test_as_it_is_nothing_is_lost():
    """A publisher waits for all that its rank did before."""
    assert follow(GENERATIONS, slack=0) > 100


def test_the_third_generation_is_slack_for_one_step():
    assert follow(GENERATIONS, slack=1) > 100
    assert follow(2, slack=0) > 100
    with pytest.raises(Wrong, match=r"not armed|not read"):
        follow(2, slack=1)
    with pytest.raises(Wrong, match=r"not armed|not read"):
        follow(GENERATIONS, slack=2)


def test_the_model_sees_what_goes_wrong():
    with pytest.raises(Wrong):
        follow(1, slack=0)
