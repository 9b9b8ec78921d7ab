"""Whole weights go to all servers by one communicator of NCCL, which is pretended: what goes out, to whom, and when."""

from __future__ import annotations

import asyncio
import socket
import threading
from collections import Counter
from typing import Any

import pytest
import torch

from grpo_core.rollout.vllm import client as vllm_client
from tests.grpo_core.rollout.pretend_nccl import Simulated, World, simulated
from tests.grpo_core.rollout.test_vllm_client import make_transfer

pytestmark = pytest.mark.served


@pytest.mark.parametrize("count", [1, 8, 64, 256])
def test_one_copy_goes_out_whatever_the_number_of_servers(count: int, monkeypatch: pytest.MonkeyPatch) -> None:
    async def work() -> None:
        async with simulated(count, monkeypatch) as world:
            await world.hand_over()
            await world.hand_over()
            assert world.bytes_out == 2 * world.bytes
            [communicator] = world.made
            assert sorted(communicator.ranks) == [*range(1, 1 + 2 * count)]
            assert all(server.has(world.weights) for server in world.simulated)
            await world.sample()
            assert [server.sampled for server in world.simulated] == [["token-2"]] * count
            assert {len(server.asked) for server in world.simulated} == {len(world.simulated[0].asked)}

    asyncio.run(work())


HANGS = [
    *(("take_lease", -1), ("end_weight_update", -1), ("/init_weight_transfer_engine", -1)),
    *(("/start_weight_update", -1), ("/update_weights", -1), ("none", 0), ("none", 3), ("/finish_weight_update", -1)),
    ("lost_weights", -1),
]


@pytest.mark.parametrize(("at", "after"), HANGS)
def test_a_server_whose_workers_hang_is_given_up_and_the_others_have_the_weights_while_it_hangs(
    at: str, after: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It goes on to say that it is well."""

    async def work() -> None:
        async with simulated(8, monkeypatch) as world:
            limits(world, monkeypatch, 1.0)
            await world.hand_over()
            before = world.bytes_out
            hanging, *healthy = world.simulated
            if at in ("end_weight_update", "/init_weight_transfer_engine"):  # it is asked for a new communicator
                world.sender.group.shutdown()
            hanging.hangs_at, hanging.stops_after = {at}, after
            await world.hand_over()
            assert not hanging.gone.is_set()
            assert world.router.up == world.servers[1:]
            assert all(server.has(world.weights) and not server.paused for server in healthy)
            assert world.bytes_out - before <= 2 * world.bytes, "what was broken off, and one copy more"
            await world.sample()
            assert {*(each for server in healthy for each in server.sampled)} == {"token-2"}

            hanging.kill()
            hanging.hangs_at, hanging.stops_after = set(), -1
            hanging.start()
            await world.back()
            assert hanging.has(world.weights) and not hanging.sampled
            await world.sample()
            assert hanging.sampled == ["token-2"]

    asyncio.run(work())


def limits(world: World, monkeypatch: pytest.MonkeyPatch, seconds: float) -> None:
    """Short ones, for servers that answer within a moment."""
    world.rendezvous_seconds = seconds
    monkeypatch.setattr(vllm_client, "CONTROL_SECONDS", seconds)
    monkeypatch.setattr(world.transfer, "CONTROL_SECONDS", seconds)
    monkeypatch.setattr(world.transfer, "STALL_SECONDS", seconds)


@pytest.mark.parametrize(
    ("count", "seconds"),
    [(8, 3.0), *(pytest.param(*each, marks=pytest.mark.e2e) for each in ((64, 10.0), (256, 30.0)))],
)
def test_one_server_hangs_one_is_late_and_one_was_started_again(
    count: int, seconds: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def work() -> None:
        async with simulated(count, monkeypatch) as world:
            limits(world, monkeypatch, seconds)
            hanging, late, again, *healthy = world.simulated
            late.kill()
            await world.hand_over()
            assert len(world.router.up) == count - 1
            assert world.bytes_out == world.bytes
            again.kill()
            again.start()
            hanging.stops_after = 3
            await world.hand_over()
            assert not hanging.gone.is_set(), "it hangs still"
            assert world.router.up == world.servers[2:]
            assert all(server.has(world.weights) and not server.paused for server in (again, *healthy))
            broken, whole = world.made[-2:]
            assert broken.aborted and broken.bytes_out < world.bytes
            assert whole.bytes_out == world.bytes
            assert {*whole.ranks.values()} == {again, *healthy}
            await world.sample()

            hanging.kill()
            for server in (hanging, late):
                server.stops_after = -1
                server.start()
            await world.back()
            await world.sample()
            assert [server.sampled for server in (hanging, late)] == [["token-2"]] * 2
            assert [server.sampled for server in (again, *healthy)] == [["token-2"] * 2] * (count - 2)
            assert {server.pauses for server in healthy} == {2}, "those that came later stopped no other"

    asyncio.run(work())


def test_a_server_that_falls_silent_or_dies_in_a_sending_is_given_up_before_any_limit(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """By the lease that it does not renew, or its connection."""

    async def work(ends: Any) -> None:
        monkeypatch.setattr(vllm_client, "LEASE_SECONDS", 0.2)
        async with simulated(8, monkeypatch) as world:
            await world.hand_over()
            failing, *healthy = world.simulated
            failing.stops_after = 2
            world.arrived = lambda server, path: server is failing and path == "/update_weights" and ends(failing)
            monkeypatch.setattr(vllm_client, "CONTROL_SECONDS", 1.0)
            keeping = [asyncio.create_task(world.router.keep_lease(server)) for server in world.servers]
            await world.hand_over()
            assert world.router.up == world.servers[1:]
            assert all(server.has(world.weights) for server in healthy)
            assert [each.aborted for each in world.made] == [True, False]
            for each in keeping:
                each.cancel()

    asyncio.run(work(lambda server: server.hangs_at.add("all")))
    asyncio.run(work(Simulated.kill))


def test_servers_that_come_late_are_sent_the_weights_together_and_stop_no_other(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async def work() -> None:
        async with simulated(8, monkeypatch) as world:
            late, others = world.simulated[5:], world.simulated[:5]
            for server in late:
                server.kill()
            await world.hand_over()
            assert len(world.router.up) == 5
            pauses, out = [server.pauses for server in others], world.bytes_out
            assert out == world.bytes

            first, second, third = late
            begun, others_wait, loop = asyncio.Event(), threading.Event(), asyncio.get_running_loop()
            connect, begin = world.connect, world.sender._begin

            def connect_slowly(info: Any, **keys: Any) -> Any:
                loop.call_soon_threadsafe(begun.set)
                assert others_wait.wait(60)
                return connect(info, **keys)

            def begin_or_wait() -> None:
                begin()
                if len(world.sender.waiting) == 2:
                    others_wait.set()

            monkeypatch.setattr(world.transfer.WeightTransferTrainerFactory, "trainer_init", connect_slowly)
            monkeypatch.setattr(world.sender, "_begin", begin_or_wait)
            first.start()
            await begun.wait()
            second.start()
            third.start()
            await world.back()
            assert world.bytes_out - out == 2 * world.bytes
            assert [server.pauses for server in others] == pauses
            assert all(server.has(world.weights) for server in late)
            await world.sample()
            assert [server.sampled for server in world.simulated] == [["token-1"]] * 8

            made = len(world.made)
            await world.hand_over()
            assert len(world.made) == made + 1 and len(world.made[-1].ranks) == 2 * 8
            assert sum(not each.aborted for each in world.made) == 1, "one communicator has buffers"

    asyncio.run(work())


def test_a_server_that_was_started_again_samples_by_no_other_weights(monkeypatch: pytest.MonkeyPatch) -> None:
    async def work() -> None:
        async with simulated(8, monkeypatch) as world:
            await world.hand_over()
            again = world.simulated[3]
            again.kill()
            again.start()
            await world.hand_over()  # its lease says nothing: it is found in the hand-over
            assert len(world.router.up) == 8
            assert again.has(world.weights)
            assert world.bytes_out == 2 * world.bytes
            assert [each.aborted for each in world.made] == [True, False]
            await world.sample()
            assert [server.sampled for server in world.simulated] == [["token-2"]] * 8

    asyncio.run(work())


def test_what_fails_twice_by_no_server_fails_for_all(monkeypatch: pytest.MonkeyPatch) -> None:
    async def work() -> None:
        async with simulated(8, monkeypatch) as world:
            tried = list[str]()

            def fail(*_: Any, **__: Any) -> None:
                tried.append("")
                raise RuntimeError("NCCL error: unhandled system error")

            monkeypatch.setattr(world.transfer.WeightTransferTrainerFactory, "trainer_init", fail)
            world.want()
            world.sender.expect(world.servers)
            failing = [world.router._restore(server) for server in world.servers]
            await asyncio.gather(*failing)
            world.router.stop()
            assert len(tried) == 2
            assert {server.problem for server in world.servers} == {
                "weights cannot be sent: RuntimeError: NCCL error: unhandled system error (see the server's log)"
            }

    asyncio.run(work())


def test_the_base_under_an_adapter_is_made_once_for_all_servers_that_lack_it(monkeypatch: pytest.MonkeyPatch) -> None:
    async def work() -> None:
        async with simulated(8, monkeypatch) as world:
            made, given = list[dict[str, torch.Tensor]](), Counter[str]()

            def base() -> dict[str, torch.Tensor]:
                made.append(world.next_weights())
                return made[-1]

            monkeypatch.setattr(world.transfer, "_send_adapter", lambda server, *_: given.update([server.url]))
            monkeypatch.setattr(world.transfer.Transfer, "lost_weights", lambda self, sent: [])
            world.want(adapter={"r": 4}, base=base)
            for server in world.simulated[:3]:
                server.version = "default"
            for server in world.simulated[3:]:
                server.version = "another training's"
            await world.router.hand_over()
            assert len(made) == 1
            assert world.bytes_out == world.bytes
            assert [server.has(made[0]) for server in world.simulated] == [False] * 3 + [True] * 5
            assert given == Counter(server.url for server in world.servers)

    asyncio.run(work())


def test_servers_meet_at_an_address_that_those_on_other_machines_reach(monkeypatch: pytest.MonkeyPatch) -> None:
    """127.0.0.2 stands for this machine's address in the network."""
    transfer, connect = make_transfer(), socket.create_connection

    def through(where: tuple[str, int], seconds: float) -> socket.socket:
        address = "127.0.0.1" if where[0] == "localhost" else "127.0.0.2"
        return connect(("127.0.0.1", where[1]), seconds, source_address=(address, 0))

    monkeypatch.setattr(socket, "create_connection", through)
    monkeypatch.setattr(transfer, "LOOPBACK", "127.0.0.1")
    with socket.create_server(("", 0)) as there:
        here, elsewhere = (f"http://{name}:{there.getsockname()[1]}" for name in ("localhost", "gpu-3"))
        assert transfer._meeting_point([here, here])[0] == "127.0.0.1"
        assert transfer._meeting_point([here, elsewhere, here])[0] == "127.0.0.2"
