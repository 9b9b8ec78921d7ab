"""vLLM in processes of its own: one server or several, on other GPUs or another machine.

They are asked over HTTP from an event loop in a thread, so that they can sample while the trainer trains. Every answer
says which weights sampled each of its tokens.
"""

from __future__ import annotations

import asyncio
import json
import math
import os
import socket
import threading
import uuid
from collections.abc import Callable, Coroutine, Mapping, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, wait
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, TypeVar

import torch
from accelerate import PartialState
from torch import Tensor, nn

from grpo_core.config.run import RunConfig
from grpo_core.distributed import failing_together, from_main, leave_word, shard_count, word_of_main
from grpo_core.errors import EngineError
from grpo_core.model.four_bit import is_quantised
from grpo_core.model.loading import base_weights, copy_of_whole_weights, in_checkpoint_layout
from grpo_core.model.sharded import is_sharded
from grpo_core.planning.sampling_ahead import choose_groups
from grpo_core.rollout.checksums import checksums_of
from grpo_core.rollout.requests import training_sampling, vllm_parameters
from grpo_core.rollout.types import Completion, Request, Sampling, Stream
from grpo_core.rollout.vllm.adapter import ADAPTER, adapter_of
from grpo_core.rollout.vllm.client import NO_WEIGHTS, OVER_4BIT, OVER_BASE, Server, Weights, token_versions
from grpo_core.rollout.vllm.logprobs import HEAD, LOGPROBS_MODE
from grpo_core.rollout.vllm.router import Router
from grpo_core.rollout.vllm.serve import max_adapter_rank, read_addresses, wrong_vllm
from grpo_core.rollout.vllm.snapshot import take_snapshot

# vLLM must sample a token to score a prompt; greedy, it draws no random number for it.
SCORE = {"max_tokens": 1, "temperature": 0.0, "prompt_logprobs": 0}
TURN_SECONDS = 0.05  # after which a caller that waits for completions may do something else
FOLLOW_SECONDS = 2.0  # between two looks for new addresses of servers
NOT_A_NUMBER = -9999.0  # in vLLM's answers, for a log-probability of NaN or -inf

Result = TypeVar("Result")


@dataclass(frozen=True)
class _Begun:
    """A request that is being sampled; `due`: latest version of the weights at which it is taken."""

    due: int
    answer: Future[list[Completion]]


class VLLMServerEngine:
    """An Engine and Lookahead over one or several servers, among which requests are routed.

    The servers get the model's weights at the start. For a model under an adapter, they have the base and get the
    adapter alone, unless vLLM cannot compute with it: then it is merged into the layers that it adapts.
    """

    def __init__(self, config: RunConfig, model: nn.Module, max_length: int):
        if wrong := wrong_vllm():
            raise EngineError(wrong)
        from grpo_core.rollout.vllm.send_weights import Sender
        from grpo_core.rollout.vllm.shared_memory import pid_namespace_id

        urls = config.rollout.vllm_server_base_urls or read_addresses()
        if not urls:
            raise EngineError(
                "rollout.engine='vllm-server' without a server: name them in rollout.vllm_server_base_urls "
                "(`python -m grpo_core.rollout.vllm.serve CONFIG` starts one), or let `grpo run` start them"
            )
        process = PartialState()
        self.sends = process.is_main_process
        self.dtype = torch.bfloat16 if config.train.mixed_precision == "bf16" else torch.float32
        # 0 for whole weights: an evaluation's adapter is merged.
        self.adapter_rank = max_adapter_rank(config) if hasattr(model, "peft_config") else 0
        self.token = from_main(uuid.uuid4().hex)
        holder = f"run {config.name!r} on {socket.gethostname()}, process {os.getpid()}"
        on_cpu = next(model.parameters()).device.type == "cpu"

        rounding: set[str] = set()  # servers whose logits are not float32

        def objection(url: str, started: Mapping[str, Any]) -> str:
            if _head_dtype(started) != "float32" and url not in rounding:
                rounding.add(url)
                if self.sends:
                    print(f"the vLLM server at {url} {_rounds(started)}", flush=True)
            return _objection(started, config, max_length, on_cpu, pid_namespace_id(), self.adapter_rank)

        sender = Sender()
        as_trainer = config.rollout, self.token, holder
        self.servers = [
            Server(url, *as_trainer, partial(objection, url), sender.send, process.num_processes, leases=self.sends)
            for url in urls
        ]
        # The other processes wait for a server that is back while the main process sends it the weights.
        sending = 0.0 if self.sends else config.rollout.vllm_request_timeout
        seconds = config.rollout.vllm_server_timeout + sending
        first = process.process_index
        self.router = Router(self.servers, seconds, first, reports=self.sends, sender=sender)
        # What the training waits for goes before what is sampled ahead of it.
        self.urgent = {"priority": -1} if config.rollout.max_staleness else {}
        self.version = 0  # of the weights, counted by hand-overs
        self.notes: list[str] = []
        self.begun: dict[tuple[Any, ...], _Begun] = {}
        self.loop = asyncio.new_event_loop()
        threading.Thread(target=self.loop.run_forever, daemon=True).start()
        if self.sends:
            watching = [*map(self.router.keep_lease, self.servers), self.router.tell(partial(leave_word, self.token))]
        else:
            watching = [self.router.follow(partial(word_of_main, self.token))]
        self.keepers = [*map(self._start, watching)]
        if not config.rollout.vllm_server_base_urls:
            self.keepers.append(self._start(_follow_addresses(self.servers)))
        try:
            with failing_together(kind=EngineError):
                if self.sends:
                    self._run(self.router.connect())
            self.sync_weights(model)
        except BaseException:  # after a refusal, nothing may go on asking for the lease
            self._stop_keeping()
            raise

    def sync_weights(self, model: nn.Module) -> str:
        """Requests that are being sampled pause meanwhile, and go on with the new weights."""
        for server in self.servers:
            server.wanted = NO_WEIGHTS  # which frees the last copy before there is another
        self.version += 1
        adapter: Mapping[str, Any] | None = None
        base: Callable[[], Mapping[str, Tensor]] | None = None
        snapshot: Mapping[str, Tensor] | None
        checksums: Mapping[str, int] | None = None
        if self.adapter_rank:
            adapter, tensors = adapter_of(model, self.dtype)
            snapshot = tensors if self.sends else None
            base = None if is_sharded(model) else lambda: _made(base_weights(model))
        elif is_sharded(model):
            if (count := shard_count(model)) > (here := int(os.environ.get("LOCAL_WORLD_SIZE", count))):
                raise EngineError(
                    f"train.sharding='full' over {count} processes, {here} of them on this machine: whole weights "
                    "are put together for servers from the memory of one machine, and each has a part of them; set "
                    "train.sharding to 'hybrid', or rollout.engine to 'vllm'"
                )
            snapshot = of_shards = take_snapshot(model, self.dtype, mine=self.sends)
            checksums = of_shards.checksums if of_shards else {}
        else:
            snapshot = None
            if self.sends:
                snapshot = _made(dict(in_checkpoint_layout(model, copy_of_whole_weights(model).items())))
        if checksums is None:
            checksums = checksums_of(snapshot or {})
        over = OVER_4BIT if is_quantised(model) else OVER_BASE
        self._hand_over(Weights(self.version, snapshot, adapter, base, over, checksums))
        return (
            ("adapter " if adapter else "")
            + "sent by "
            + ", ".join(sorted({server.backend for server in self.servers if server.backend}))
        )

    def _hand_over(self, weights: Weights) -> None:
        """Bring the weights to the servers that are up. The main process sends them; the others then sample at those
        servers that have them. Raises EngineError in every process if one finds none."""
        with failing_together(kind=EngineError):
            if self.sends:
                self._want(weights)
                self._run(self.router.hand_over())
                leave_word(self.token, json.dumps(self.router.states))
        states = from_main(self.router.states)
        with failing_together(kind=EngineError):
            if not self.sends:
                self._want(weights)
                self._run(self.router.adopt(states))

    def _want(self, weights: Weights) -> None:
        for server in self.servers:
            server.wanted = weights

    def begin(self, requests: Sequence[Request], sampling: Sampling, max_staleness: int) -> None:
        for request in requests:
            if (key := _key(request, sampling)) not in self.begun:
                self.begun[key] = _Begun(self.version + max_staleness, self._submit(request, sampling, {}))

    def take(self, requests: Sequence[Request], sampling: Sampling, count: int) -> Stream:
        keys = [_key(request, sampling) for request in requests]
        left = {number: self.begun[key] for number, key in enumerate(keys)}
        room = count
        while room:
            done = [number for number, begun in left.items() if begun.answer.done()]
            due = {number: begun.due for number, begun in left.items()}
            taken = choose_groups(done, due, self.version, room, count)
            if not taken:
                others = [begun.answer for number, begun in left.items() if number not in done]
                wait(others, TURN_SECONDS, FIRST_COMPLETED)
            room -= len(taken)
            left = {number: begun for number, begun in left.items() if number not in taken}
            yield [(number, self._aged(self.begun.pop(keys[number]).answer.result())) for number in taken]

    def drop_begun(self) -> None:
        """Cancel the requests that were begun: their answers will not be asked for."""
        for begun in self.begun.values():
            begun.answer.cancel()  # which closes the connection, and that ends the request
        self.begun.clear()

    def generate(self, requests: Sequence[Request], sampling: Sampling) -> Stream:
        return self._stream(requests, sampling, ahead=False)

    def generate_ahead(self, requests: Sequence[Request], sampling: Sampling) -> Stream:
        return self._stream(requests, sampling, ahead=True)

    def _stream(self, requests: Sequence[Request], sampling: Sampling, *, ahead: bool) -> Stream:
        numbers: dict[Future[list[Completion]], int] = {}  # of the requests that are not finished
        count, more = 0, requests
        try:
            while numbers or more:
                for number, request in enumerate(more, count):
                    numbers[self._submit(request, sampling, {} if ahead else self.urgent)] = number
                count += len(more)
                finished, _ = wait(numbers, TURN_SECONDS, FIRST_COMPLETED)
                given = [(numbers.pop(future), future.result()) for future in finished]
                if not ahead:
                    given = [(number, [replace(each, versions=None) for each in found]) for number, found in given]
                more = (yield given) or ()
        finally:
            for future in numbers:
                future.cancel()  # which closes the connection, and that ends the request

    def compute_logprobs(self, sequences: Sequence[list[int]]) -> list[list[float]]:
        """Called by every process with the same sequences: the main process asks for all, since the servers are the
        same. Raises EngineError in every process."""
        found: list[list[float]] = []
        with failing_together(kind=EngineError):
            if self.sends:
                found = self._score(sequences)
        return from_main(found)

    def _score(self, sequences: Sequence[list[int]]) -> list[list[float]]:
        bodies = [self._body(ids, SCORE, self.urgent) for ids in sequences]
        version = self.version

        async def ask(server: Server) -> list[list[float]]:
            answers = await asyncio.gather(*(server.score(body, version) for body in bodies))
            return [_prompt_logprobs(ids, answer) for ids, answer in zip(sequences, answers, strict=True)]

        return [row for rows in self._run(self.router.ask_each(ask)) for row in rows]

    def close(self) -> None:
        self._stop_keeping()
        if self.sends:
            self._run(_gather(server.release() for server in self.servers))
        self.loop.call_soon_threadsafe(self.loop.stop)

    def _stop_keeping(self) -> None:
        for keeper in self.keepers:
            keeper.cancel()
        self.loop.call_soon_threadsafe(self.router.stop)

    def _aged(self, found: list[Completion]) -> list[Completion]:
        """Return the completions with ages instead of versions."""
        ages = ([self.version - then for then in each.versions or ()] for each in found)
        return [replace(each, ages=own, versions=None) for each, own in zip(found, ages, strict=True)]

    def _submit(self, request: Request, sampling: Sampling, options: Mapping[str, Any]) -> Future[list[Completion]]:
        parameters = vllm_parameters(request, sampling)
        seeds = range(request.seed, request.seed + request.num_completions)
        bodies = [self._body(request.prompt_ids, {**parameters, "seed": seed}, options) for seed in seeds]
        return self._start(self._complete(bodies, self.version, request.conversation))

    async def _complete(
        self, bodies: Sequence[Mapping[str, Any]], oldest: int, conversation: int | None
    ) -> list[Completion]:
        """Send one request per completion, so that each takes a server's room only while it is sampled."""
        answers = await asyncio.gather(*(self.router.complete(body, oldest, conversation) for body in bodies))
        return [
            Completion(
                choice["token_ids"],
                choice["logprobs"],
                truncated=choice["finish_reason"] == "length",
                versions=token_versions(choice, self.token),
            )
            for (choice,) in answers
        ]

    def _body(self, ids: list[int], parameters: Mapping[str, Any], options: Mapping[str, Any]) -> dict[str, Any]:
        adapter = {"model": ADAPTER} if self.adapter_rank else {}
        return {"token_ids": ids, "sampling_params": {"detokenize": False, **parameters}, **options, **adapter}

    def _start(self, work: Coroutine[Any, Any, Result]) -> Future[Result]:
        return asyncio.run_coroutine_threadsafe(work, self.loop)

    def _run(self, work: Coroutine[Any, Any, Result]) -> Result:
        future = self._start(work)
        try:
            return future.result()
        finally:
            future.cancel()  # if the wait was interrupted


def _made(tensors: Mapping[str, Tensor]) -> Mapping[str, Tensor]:
    """Wait until the device has made the tensors, which are sent from other threads on other streams."""
    for device in {tensor.device for tensor in tensors.values() if tensor.is_cuda}:
        torch.cuda.current_stream(device).synchronize()
    return tensors


async def _follow_addresses(servers: Sequence[Server]) -> None:
    """Watch until cancelled for servers that the stage has started again at another address."""
    while True:
        await asyncio.sleep(FOLLOW_SECONDS)
        with suppress(OSError):
            for server, url in zip(servers, await asyncio.to_thread(read_addresses), strict=True):
                if url != server.url:
                    server.move(url)


async def _gather(questions: Any) -> list[Any]:
    return await asyncio.gather(*questions)


def _prompt_logprobs(ids: list[int], scores: Sequence[Any]) -> list[float]:
    scored = [found[str(token)]["logprob"] for token, found in zip(ids[1:], scores[1:], strict=True)]
    return [math.nan if logprob == NOT_A_NUMBER else logprob for logprob in scored]  # the first token has none


def _key(request: Request, sampling: Sampling) -> tuple[Any, ...]:
    return (tuple(request.prompt_ids), request.num_completions, request.seed, request.max_tokens, sampling)


def _head_dtype(started: Mapping[str, Any]) -> str:
    return started.get("head_dtype", started["dtype"])  # a release before this one does not say


def _rounds(started: Mapping[str, Any]) -> str:
    return (
        f"rounds its logits to {_head_dtype(started)}, by which its log-probabilities are further from the trainer's: "
        f"start it with --hf-overrides '{json.dumps(HEAD)}'"
    )


def _objection(
    started: Mapping[str, Any], config: RunConfig, max_length: int, on_cpu: bool, here: str, adapter_rank: int = 0
) -> str:
    """Sentence on why a server started with these options cannot be used; "" if it can."""
    dtype = "bfloat16" if config.train.mixed_precision == "bf16" else "float32"
    transfers = ["shared_memory", "http"] if on_cpu else ["nccl", "ipc"]
    if started["weight_transfer"] not in transfers:
        return f"takes weights by {started['weight_transfer']}, and here they can be sent by {' or '.join(transfers)}"
    if started["weight_transfer"] == "shared_memory" and started["pid_namespace_id"] != here:
        return (
            "takes weights by shared memory, which another machine or container does not see; run it beside this one, "
            "or start it with rollout.vllm_weight_transfer='http'"
        )
    if started["weight_transfer"] == "ipc" and config.train.num_processes > 1:
        return (
            f"takes weights by ipc, which is for one training process; train.num_processes={config.train.num_processes}"
        )
    if started["dtype"] != dtype:
        return f"computes in {started['dtype']}, the policy in {dtype} (train.mixed_precision)"
    if started["logprobs_mode"] != LOGPROBS_MODE:
        return f"answers with {started['logprobs_mode']}, needed are {LOGPROBS_MODE}"
    if "truncation_problem" in started and training_sampling(config.rollout).is_truncated:
        return (
            "was started by an earlier release, which gives log-probabilities over the whole vocabulary also with "
            "top_p, top_k or min_p: start it again"
        )
    if started["lora_rank"] < adapter_rank:
        return (
            f"makes room for adapters of rank {started['lora_rank']} at most, model.lora_r={config.model.lora_r}"
            if started["lora_rank"]
            else "takes no adapters, and model.use_peft=true"
        )
    if (started.get("speculation") or None) != config.rollout.speculation:
        return (
            f"speculates by {started.get('speculation')}, and rollout.vllm_args.speculative_config is "
            f"{config.rollout.speculation}"
        )
    if started["max_model_len"] < max_length:
        return f"takes sequences of {started['max_model_len']} tokens, the longest here has {max_length}"
    if config.rollout.max_staleness and started["scheduling_policy"] != "priority":
        return "works in the order of arrival, and rollout.max_staleness needs --scheduling-policy priority"
    if on_cpu and started["chunked_prefill"]:
        return "computes prompts in chunks, after which a seed on a CPU does not give the same tokens again"
    return ""
