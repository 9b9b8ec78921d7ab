"""Several servers as one: which is asked what, and what happens when some of them die, freeze and come back."""

from __future__ import annotations

import asyncio
import random
from typing import Any, cast

import pytest
import torch

from grpo_core.rollout.types import Request
from grpo_core.rollout.vllm import client as vllm_client
from grpo_core.rollout.vllm.router import Router
from grpo_core.rollout.vllm.server_engine import VLLMServerEngine
from tests.grpo_core.rollout.asking import SAMPLING, Asking, ask, model, plain, requests, wait_until_back
from tests.grpo_core.rollout.pretend_vllm import Serving, plain_ids
from tests.grpo_core.rollout.vllm_engine import hold
from tests.steps import steps


@pytest.mark.slow
def test_the_turns_of_a_conversation_are_asked_of_one_server(serving: Serving) -> None:
    with serving(128, 128) as (servers, engine):
        turns = [len(each) for each in hold(engine, 12)]
        starts = [{tuple(prompt[:100]) for prompt in server.asked} for server in servers]
        assert not starts[0] & starts[1]
        assert all(starts) and len(starts[0]) + len(starts[1]) == 12  # how many each gets: as quickly as it answers
        assert sum(len(server.asked) for server in servers) == sum(turns) > 12


def test_the_turns_after_a_servers_death_are_asked_of_another(serving: Serving) -> None:
    with serving(128, 128) as (servers, engine):
        turns = [Request([3] * (1 + number), 1, number, conversation=7) for number in range(4)]
        ask(engine, turns[:2])
        [home] = [server for server in servers if server.asked]
        home.kill()
        ask(engine, turns[2:3])
        home.start()
        ask(engine, turns[3:])
        assert [server.asked for server in servers if server is not home] == [[each.prompt_ids for each in turns[2:]]]


@pytest.mark.slow
def test_the_least_loaded_server_for_its_size_gets_the_next_request(serving: Serving) -> None:
    with serving(4, 12) as (servers, engine):
        small, large = servers
        for server in servers:
            server.open.clear()
        some = Asking(engine, requests(4))
        small.wait_for(1)
        large.wait_for(3)
        others = Asking(engine, requests(24))
        small.wait_for(4)
        large.wait_for(12)
        large.open.set()  # the small one is slow
        large.wait_for(24)
        assert (len(small.asked), len(large.asked)) == (4, 24)
        small.open.set()
        assert (some.join(), others.join()) == (plain(requests(4)), plain(requests(24)))


@pytest.mark.slow
def test_what_a_dead_server_was_asked_is_asked_of_another_and_it_comes_back_with_the_weights_of_now(
    serving: Serving, capfd: pytest.CaptureFixture[str]
) -> None:
    policy = model(1.0)
    with serving(128, 128, model=policy) as (servers, engine):
        dying, other = servers
        dying.open.clear()
        asking = Asking(engine, requests(8, 2))
        dying.wait_for(8)
        dying.kill()
        assert asking.join() == plain(requests(8, 2))
        assert len(other.asked) == 16
        assert engine.compute_logprobs([[3, 4]]) == [[-1.0]]

        torch.nn.init.constant_(policy.weight, 2.0)
        engine.sync_weights(policy)
        assert engine.compute_logprobs([[3, 4]]) == [[-2.0]]
        torch.nn.init.constant_(policy.weight, 3.0)  # an update goes on; no server may get these

        dying.open.set()
        dying.start()
        wait_until_back(engine)
        assert engine.compute_logprobs([[3, 4]]) == [[-2.0], [-2.0]]
        for server in servers:
            server.open.clear()
        asking = Asking(engine, requests(8))
        dying.wait_for(8 + 4)
        other.wait_for(16 + 4)
        for server in servers:
            server.open.set()
        assert asking.join() == plain(requests(8))
        torch.nn.init.constant_(policy.weight, 4.0)
        engine.sync_weights(policy)
        assert engine.compute_logprobs([[3, 4]]) == [[-4.0], [-4.0]]
    lines = [line for line in capfd.readouterr().out.splitlines() if dying.url in line]
    assert [" is left out: " in line for line in lines] == [True, False], lines
    assert "1 of 2 sample now" in lines[0]
    assert " is back (2 of 2 sample now)" in lines[1]


@pytest.mark.slow
@pytest.mark.parametrize("seed", [0, *(pytest.param(seed, marks=pytest.mark.e2e) for seed in (1, 2))])
def test_servers_that_die_and_return_at_any_time_leave_no_trace_in_the_answers(serving: Serving, seed: int) -> None:
    draw = random.Random(seed)
    with serving(4, 5, 6) as (servers, engine):
        asked = [Request([3 + i, 4], 1 + i % 3, 100 * i, 1 + i % 4, i % 7 or None) for i in range(60)]
        expected = [
            [plain_ids(each.prompt_ids, each.seed + n, each.max_tokens or 0) for n in range(each.num_completions)]
            for each in asked
        ]
        for server in servers:
            server.open.clear()
        asking = Asking(engine, asked)
        for server, capacity in zip(servers, (4, 5, 6), strict=True):
            server.wait_for(capacity)
        for _ in range(4):
            server = draw.choice(servers)
            count = len(server.asked)
            server.kill()
            server.start()
            server.wait_for(count + 1)
        for server in servers:
            server.open.set()
        assert asking.join() == expected


@pytest.mark.slow
def test_a_frozen_server_is_left_out_and_what_it_was_asked_is_asked_of_another(
    serving: Serving, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(vllm_client, "CONTROL_SECONDS", 1.0)
    with serving(128, 128) as (servers, engine):
        frozen, other = servers
        frozen.open.clear()
        asking = Asking(engine, requests(2))
        frozen.wait_for(1)
        frozen.answering.clear()
        assert asking.join() == plain(requests(2))
        assert len(other.asked) == 2
        frozen.open.set()
        frozen.answering.set()
        wait_until_back(engine)


@pytest.mark.slow
def test_a_server_that_fails_quickly_and_is_brought_back_each_time_fails_no_request_twice(serving: Serving) -> None:
    with serving(4, 4) as (servers, engine):
        broken, other = servers
        broken.broken = True
        other.open.clear()  # as long as the broken one has nothing left to fail
        asking = Asking(engine, requests(20))
        broken.wait_for(16)
        other.open.set()
        assert asking.join() == plain(requests(20))
        assert len(broken.asked) == len({tuple(prompt) for prompt in broken.asked})


def _wait_for_queue(engine: VLLMServerEngine, count: int) -> None:
    """Until so many requests wait for room."""

    async def waiting() -> int:
        return sum(map(len, engine.router.waiting.values()))

    for _ in range(10_000):
        if engine._run(waiting()) == count:
            return
    raise AssertionError(f"{engine._run(waiting())} wait, not {count}")


@pytest.mark.slow
def test_a_server_works_on_no_more_completions_than_it_has_room_for_and_none_waits_in_it(serving: Serving) -> None:
    with serving(3, 5) as (servers, engine):
        for server in servers:
            server.open.clear()
        asking = Asking(engine, requests(20, 4))
        for server, room in zip(servers, (3, 5), strict=True):
            server.wait_for(room)
            server.open.set()
        assert asking.join() == plain(requests(20, 4))
        assert [server.most for server in servers] == [3, 5]


@pytest.mark.slow
def test_completions_of_a_prompt_are_asked_of_one_server_while_it_has_room(serving: Serving) -> None:
    with serving(12, 12) as (servers, engine):
        for server in servers:
            server.open.clear()
        asking = Asking(engine, requests(6, 4))
        for server in servers:
            server.wait_for(12)
            assert len({tuple(prompt) for prompt in server.asked}) == 3
            server.open.set()
        assert asking.join() == plain(requests(6, 4))


def test_what_the_training_waits_for_goes_before_what_waits_to_be_sampled_ahead(serving: Serving) -> None:
    with serving(2, max_staleness=2) as (servers, engine):
        [server] = servers
        server.open.clear()
        ahead, urgent = requests(3, 2), [Request([1000 + number], 1, number) for number in range(3)]
        engine.begin(ahead, SAMPLING, 2)
        server.wait_for(2)
        evaluating = Asking(engine, urgent)
        _wait_for_queue(engine, 4 + 3)
        server.open.set()
        assert evaluating.join() == plain(urgent)
        assert len([*engine.take(ahead, SAMPLING, 3)]) >= 1
        order = [prompt[0] for prompt in server.asked]
        assert order[:2] == [3, 3]  # were there already
        assert {1000, 1001, 1002} < {*order[2:6]}  # of two under way together, either arrives first
        assert sorted(order[2:]) == [4, 4, 5, 5, 1000, 1001, 1002]


def test_turns_that_are_sampled_ahead_tell_their_weights_and_are_not_urgent(
    serving: Serving, monkeypatch: pytest.MonkeyPatch
) -> None:
    with serving(4, max_staleness=2) as (servers, engine):
        [server] = servers
        asked = list[Any]()
        complete = server.complete
        monkeypatch.setattr(server, "complete", lambda body: asked.append(body.get("priority", 0)) or complete(body))
        engine.sync_weights(model(2.0))
        ahead = [each for step in engine.generate_ahead(requests(1), SAMPLING) for _, each in step]
        urgent = [each for step in engine.generate(requests(1), SAMPLING) for _, each in step]
        assert ahead[0][0].versions == [2] * SAMPLING.max_tokens
        assert urgent[0][0].versions is None
        assert asked == [0, -1]


def test_what_a_dead_server_was_asked_keeps_its_place(serving: Serving) -> None:
    with serving(1, 1) as (servers, engine):
        for server in servers:
            server.open.clear()
        asking = Asking(engine, requests(6))
        for server in servers:
            server.wait_for(1)
        _wait_for_queue(engine, 4)
        dying, other = servers
        dying.kill()
        _wait_for_queue(engine, 5)
        other.open.set()
        assert asking.join() == plain(requests(6))
        assert [prompt[0] - 3 for prompt in other.asked] == [1, 0, 2, 3, 4, 5]


class Instant:
    """A server with room for one request, which it answers at once."""

    def __init__(self) -> None:
        self.problem, self.capacity, self.in_flight, self.url = "", 1, 0, ""

    @property
    def has_room(self) -> bool:
        return self.in_flight < self.capacity

    async def complete(self, body: dict[str, Any], oldest: int) -> int:
        await asyncio.sleep(0)
        return body["turn"]


def test_turns_that_wait_for_one_server_are_not_looked_at_whenever_one_has_an_answer() -> None:
    async def turns(count: int) -> None:
        router = Router(cast("Any", [Instant(), Instant()]), 0, 0, reports=False, sender=None)
        found = [router.complete({"turn": turn}, 0, conversation=7) for turn in range(count)]
        assert await asyncio.gather(*found) == [*range(count)]
        [home] = {*router.homes.values()}
        assert home.in_flight == 0 and not any(router.waiting.values())

    few, many = (steps(lambda of=count: asyncio.run(turns(of))) for count in (50, 200))
    assert many < 8 * few
