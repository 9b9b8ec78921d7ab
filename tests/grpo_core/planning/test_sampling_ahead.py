"""The simulation of sampling ahead, against times computed by hand and a plain simulation that goes step by step."""

from __future__ import annotations

import math
import random
from collections import Counter
from itertools import chain
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from grpo_core.planning.sampling_ahead import Group, Speed, choose_groups, simulate

SPEED = Speed(step=1.0, sequence=0.5, prefill=0.125, hand_over=2.0, update=10.0, token=0.25)


def _group(*lengths: int) -> Group:
    return [[(length, 0.0)] for length in lengths]


def test_a_batch_takes_what_finishes_first_as_far_as_nothing_that_is_left_gets_too_old() -> None:
    due = {7: 3, 8: 4, 9: 5, 5: 6}
    assert choose_groups([9, 8, 5], due, 4, room=2, count=3) == [8]  # 7 has to be in this batch, too
    assert choose_groups([9, 8, 5], due, 4, room=3, count=3) == [9, 8]
    assert choose_groups([9, 5], due, 4, room=3, count=3) == [9]
    later = {group: last + 6 for group, last in due.items()}
    assert choose_groups([9, 5], later, 4, room=3, count=3) == [9, 5]


def test_what_later_batches_have_no_room_for_is_in_this_one() -> None:
    due = {**dict.fromkeys(range(6), 4), 6: 5}
    assert choose_groups([6, 3, 5, 4], due, 2, room=2, count=2) == [3, 5]  # the next two take the other four
    later = {group: last + 1 for group, last in due.items()}
    assert choose_groups([6, 3, 5, 4], later, 2, room=2, count=2) == [6, 3]  # the next three could take six


def test_sampling_and_training_in_turn_take_the_sum_of_their_parts() -> None:
    found = simulate([_group(3, 5), _group(4, 4)], 1, 0, 1, 8, SPEED, prompt_tokens=4)
    first = 3 * 2.0 + 2 * 1.5  # three steps with two sequences, two with one
    second = 4 * 2.0
    prompts = 2 * 4 * 0.125
    assert found.waited == pytest.approx(first + second + prompts)
    assert found.seconds == pytest.approx(found.waited + 2 * (2.0 + 10.0) + 0.25 * 16)
    assert found.batches == [[(0, 0)], [(1, 0)]]
    assert found.mean_staleness == 0


def test_sequences_beyond_the_slots_wait_for_one() -> None:
    found = simulate([_group(3, 5, 2)], 1, 0, 1, 2, Speed(step=1.0))
    assert found.seconds == 5  # the third begins when the first ends


def test_servers_share_the_groups() -> None:
    groups = [_group(4), _group(4), _group(4), _group(4)]
    assert simulate(groups, 4, 0, 2, 8, Speed(step=0.0, sequence=1.0)).seconds == 8  # steps with two sequences each
    assert simulate(groups, 4, 0, 4, 8, Speed(step=0.0, sequence=1.0)).seconds == 4


def test_a_conversation_holds_no_slot_while_its_tool_works() -> None:
    talk: Group = [[(2, 6.0), (3, 0.0)]]
    assert simulate([talk, _group(6)], 2, 0, 1, 1, Speed(step=1.0)).seconds == 2 + 6 + 3


def test_what_is_sampled_ahead_stands_still_while_weights_come_and_is_then_computed_again() -> None:
    found = simulate([_group(4), _group(20)], 1, 1, 1, 8, SPEED, prompt_tokens=4)
    # The first batch: 1 s of prompts, then 4 steps with two sequences. Training takes 11 s, in which the other group
    # gets 11 / 1.5 tokens more; then the prompt and what it has are computed again.
    has = 4 + 11 / 1.5
    first = 2.0 + 2 * 0.5 + 4 * 2.0 + 11.0
    second = 2.0 + 0.125 * (4 + has) + (20 - has) * 1.5 + 10.0 + 0.25 * 20
    assert found.seconds == pytest.approx(first + second)
    assert found.batches == [[(0, 0)], [(1, 1)]]
    assert found.mean_staleness == pytest.approx(has / 24)


def test_a_late_group_does_not_hold_up_others_until_it_is_due() -> None:
    groups = [_group(100), *[_group(4)] * 5]
    speed = Speed(step=1.0, update=4.0)
    for most in range(1, 5):
        found = simulate(groups, 1, most, 1, 8, speed)
        assert [group for batch in found.batches for group, _ in batch].index(0) == most
        assert found.max_staleness == most


lengths = st.lists(st.integers(1, 40), min_size=2, max_size=2)


@given(
    groups=st.lists(lengths, min_size=1, max_size=14),
    per_batch=st.integers(1, 4),
    most=st.integers(0, 8),
    servers=st.integers(1, 3),
    slots=st.integers(1, 6),
    update=st.integers(0, 30),
    hand_over=st.integers(0, 3),
)
def test_it_is_what_happens_step_by_step(
    groups: list[list[int]], per_batch: int, most: int, servers: int, slots: int, update: int, hand_over: int
) -> None:
    speed = Speed(step=1.0, update=update, hand_over=hand_over)
    found = simulate([_group(*each) for each in groups], per_batch, most, servers, slots, speed)
    trained = Counter(group for batch in found.batches for group, _ in batch)
    assert trained == Counter(range(len(groups)))  # each prompt once
    assert found.max_staleness <= most
    assert 0 <= found.waited <= found.seconds
    plain = _step_by_step(groups, per_batch, most, servers, slots, update, hand_over)
    assert found.seconds == pytest.approx(plain["seconds"])
    assert [sorted(batch) for batch in found.batches] == plain["batches"]
    assert found.mean_staleness == pytest.approx(plain["staleness"])


def _step_by_step(
    groups: list[list[int]], per_batch: int, most: int, servers: int, slots: int, update: int, hand_over: int
) -> dict[str, Any]:
    """The same by a clock that ticks once per decoding step, with the choice of groups written out."""
    now, version, aged, next_group = 0, 0, 0, 0
    begun: dict[int, int] = {}
    order: list[int] = []  # groups as they were finished
    queues: list[list[tuple[int, int]]] = [[] for _ in range(servers)]  # (group, completion) with tokens to come
    has: dict[tuple[int, int], int] = {}
    batches: list[list[tuple[int, int]]] = []

    def tick() -> None:
        nonlocal now
        now += 1
        ended = []
        for queue in queues:
            for key in queue[:slots]:
                has[key] += 1
                if has[key] == groups[key[0]][key[1]]:
                    ended.append(key)
        for key in ended:
            for queue in queues:
                if key in queue:
                    queue.remove(key)
            whole = all(has[key[0], member] == length for member, length in enumerate(groups[key[0]]))
            if whole and key[0] not in order:
                order.append(key[0])

    def in_time(rest: list[int], room: int) -> bool:
        """Whether batches that take the oldest first, this one with so much room, train all before they are too old."""
        places = enumerate(sorted(rest, key=lambda group: begun[group]))
        batch_of = {group: 0 if place < room else 1 + (place - room) // per_batch for place, group in places}
        return all(version + batch_of[group] <= begun[group] + most for group in rest)

    while len(list(chain(*batches))) < len(groups):
        aged += sum(tokens for (group, _), tokens in has.items() if group in begun)
        now, version = now + hand_over, version + 1
        for group in range(next_group, min((version + math.ceil(most / 2)) * per_batch, len(groups))):
            least = min(range(servers), key=lambda n: len({key[0] for key in queues[n]}))
            queues[least] += [(group, member) for member in range(len(groups[group]))]
            has |= {(group, member): 0 for member in range(len(groups[group]))}
            begun[group] = version
            next_group = group + 1
        wanted = min(per_batch, len(begun))
        chosen: list[int] = []
        while len(chosen) < wanted:
            for group in order:
                rest = [other for other in begun if other not in (*chosen, group)]
                room = wanted - len(chosen) - 1
                if group in begun and group not in chosen and room >= 0 and in_time(rest, room):
                    chosen.append(group)
            if len(chosen) < wanted:
                tick()
        batches.append(sorted((group, version - begun.pop(group)) for group in chosen))
        for _ in range(update):
            tick()
    return {"seconds": now, "batches": batches, "staleness": aged / sum(map(sum, groups))}


def test_more_staleness_is_never_much_slower_and_pays_where_completions_have_a_long_tail() -> None:
    draw = random.Random(0)
    groups = [_group(*(min(1 + int(draw.lognormvariate(4.0, 1.0)), 1000) for _ in range(4))) for _ in range(16 * 12)]
    for update in (1.0, 20.0, 200.0, 2000.0):
        paces = [
            simulate(groups, 16, most, 1, 256, Speed(1.0, 0.01, update=update)).batches_per_hour for most in range(9)
        ]
        assert all(later > 0.97 * max(paces[:most]) for most, later in enumerate(paces) if most)
    paces = [simulate(groups, 16, most, 1, 256, Speed(1.0, update=20.0)).batches_per_hour for most in (0, 1, 4)]
    assert paces[1] > 1.3 * paces[0]
    assert paces[2] > 1.3 * paces[1]
