"""vLLM for real, on the CPU in float32: what it draws and says of tokens is what the model itself finds."""

from __future__ import annotations

import os
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import pytest

from grpo_core.errors import TrainingError
from grpo_core.rollout.conversations import play
from grpo_core.rollout.types import Request, Sampling
from tests import forked
from tests.conftest import config_values, make_model, make_run
from tests.grpo_core.rollout.sampling import sampled
from tests.grpo_core.rollout.vllm_engine import (
    MAX_LENGTH,
    can_be_drawn,
    conversations,
    cut,
    hold,
    logprob_when_drawn,
    long_requests,
    plain_distributions,
    plain_logprobs,
    sequences,
    start,
)
from tests.held import held

pytestmark = pytest.mark.served

PROMPTS = ["1+1=", "12+34=", "7"]
TRUNCATED = {
    "top_k": Sampling(6, temperature=0.7, top_k=3),
    "top_p": Sampling(6, temperature=1.3, top_p=0.6),
    "both": Sampling(6, temperature=0.7, top_k=5, top_p=0.8),
    "min_p": Sampling(6, temperature=1.3, min_p=0.3),
    "penalty": Sampling(6, temperature=0.7, repetition_penalty=1.5),
    "all": Sampling(6, temperature=0.9, top_k=9, top_p=0.9, min_p=0.05, repetition_penalty=0.8),
}
STOP = ("3", "12")


def sample(run: Path, other: Path) -> dict[str, list[Any]]:
    """What one engine says to several calls, before and after it takes other weights."""
    from grpo_core.model.loading import load_model

    engine, model, tokenizer = start(run)
    requests = [Request(tokenizer(prompt)["input_ids"], 6, seed=1000 * i) for i, prompt in enumerate(PROMPTS)]
    singles = [Request(r.prompt_ids, 1, r.seed + i) for r in requests for i in range(r.num_completions)]
    reseeded = [Request(r.prompt_ids, r.num_completions, r.seed + 500) for r in requests]
    free = Sampling(6, temperature=0.7)
    drawn = {"first": sampled(engine.generate(requests, free))}
    steps = engine.generate(requests, free)
    next(steps)
    steps.close()  # before anything has finished
    assert not engine.llm.llm_engine.engine_core.engine_core.scheduler.has_requests()
    drawn |= {
        "again": sampled(engine.generate(requests, free)),
        "singles": sampled(engine.generate(singles, free)),
        "reseeded": sampled(engine.generate(reseeded, free)),
        **{name: sampled(engine.generate(requests, sampling)) for name, sampling in TRUNCATED.items()},
        "greedy": sampled(engine.generate(singles, Sampling(6))),
        "stopped": sampled(engine.generate(requests, Sampling(6, temperature=0.7, stop=STOP))),
        "none": sampled(engine.generate([], free)),
        "long": sampled(engine.generate(long_requests(), free)),
    }
    drawn |= {"conversations": hold(engine, 12), "turn by turn": hold(engine, 1), "cached": cached_tokens(engine)}
    scores = {"base scores": engine.compute_logprobs(sequences())}
    model.load_state_dict(load_model(other).state_dict())
    engine.sync_weights(model)
    scores["synced scores"] = engine.compute_logprobs(sequences())
    drawn["synced"] = sampled(engine.generate(requests, free))
    drawn["cached synced"] = cached_tokens(engine)
    drawn["long synced"] = sampled(engine.generate(long_requests(), free))
    found = {"lent": lend(engine, model, requests, free), "unforgotten": hold_cache(engine, model, requests)}
    engine.close()
    others = {"on a GPU": start_on_a_gpu(run)}
    others |= {"too little memory": too_little_memory(run, model)}
    allocators = (None, "max_split_size_mb:512", "expandable_segments:True")
    others["on several"] = [start_on_a_gpu(run, 2, allocator)[0] for allocator in allocators]
    return drawn | scores | found | others


def cached_tokens(engine: Any) -> list[int]:
    """Tokens that the engine had from its prefix cache, in each turn of a conversation that is held twice."""
    step, found = engine.llm.llm_engine.step, list[int]()

    def noted() -> Any:
        outputs = step()
        found.extend(output.num_cached_tokens for output in outputs if output.finished)
        return outputs

    with mock.patch.object(engine.llm.llm_engine, "step", noted):
        for _ in range(2):
            for _ in play(engine, conversations(4)[3:], [0], Sampling(8, temperature=0.7)):
                pass
    return found


def lend(engine: Any, model: Any, requests: list[Request], sampling: Sampling) -> list[Any]:
    """What happens to the memory of the KV cache when it is lent between calls, and when steps are made.

    The allocator, which needs a GPU, is stood in for by notes of what it is told; all above it is vLLM's own.
    """
    worker = engine.llm.llm_engine.engine_core.engine_core.model_executor.driver_worker.worker
    notes: list[Any] = []
    step = worker.execute_model

    def noted(*arguments: Any) -> Any:
        notes.append("step")
        return step(*arguments)

    def answers() -> list[Any]:
        notes.append("sample")
        return sampled(engine.generate(requests, sampling))

    told = {
        name: lambda *tags, name=name, **named: notes.append([name, *map(list, tags), *named.values()])
        for name in ("discard", "wake_up", "sleep")
    }
    expected = answers()
    with mock.patch.multiple(worker, execute_model=noted, **told):
        notes.clear()
        engine.lends_cache = True
        engine._lend_cache()
        assert answers() == expected
        steps = engine.generate(requests, sampling)
        next(steps)
        steps.close()  # before anything has finished
        engine.sync_weights(model)
        notes.append("score")
        engine.compute_logprobs(sequences())
        assert answers() == expected
        notes.append("sample")
        assert len([*play(engine, conversations(4)[3:], [0], sampling)]) > 4  # nothing is sampled between its turns
        full, said = RuntimeError("CUDA Error: out of memory"), r"out of memory.*lower rollout.gpu_memory_utilization"
        with mock.patch.object(worker, "wake_up", side_effect=full), pytest.raises(TrainingError, match=said):
            engine.compute_logprobs(sequences())
        engine.llm.wake_up(tags=["kv_cache"])
        engine.lends_cache = False
    return notes


def hold_cache(engine: Any, model: Any, requests: list[Request]) -> list[Any]:
    """What a hand-over of weights leaves of a request that was being worked on, and what it says when a block of the
    KV cache stays in use."""
    from vllm import SamplingParams

    scheduler = engine.llm.llm_engine.engine_core.engine_core.scheduler
    prompt = {"prompt_token_ids": requests[0].prompt_ids}
    engine.llm.llm_engine.add_request("left", prompt, SamplingParams(max_tokens=3, ignore_eos=True, detokenize=False))
    engine.llm.llm_engine.step()
    assert scheduler.has_unfinished_requests()
    how = engine.sync_weights(model)
    left, said = scheduler.has_requests(), ""
    pool = scheduler.kv_cache_manager.block_pool
    blocks = pool.get_new_blocks(1)
    try:
        engine.sync_weights(model)
    except TrainingError as error:
        said = str(error)
    pool.free_blocks(blocks)
    return [how, left, said, engine.sync_weights(model)]


def start_on_a_gpu(run: Path, together: int = 1, allocator: str | None = None) -> tuple[dict[str, Any], list[str]]:
    """The options with which vLLM is started for a model on a GPU, and what it is told then. `together`: processes that
    share the engine, in the environment that a stage gives them if the user has set up the allocator in this way."""
    import torch

    from grpo_core.config.files import load_config
    from grpo_core.rollout.vllm.colocated_engine import VLLMEngine
    from tasks.processes.launch import process_environment

    keys = [f"rollout.vllm_tensor_parallel_size={together}", f"train.num_processes={together}"]
    config = load_config(run / "config.toml", keys)
    user = {} if allocator is None else {"PYTORCH_CUDA_ALLOC_CONF": allocator}

    on_gpu: Any = mock.Mock(**{"parameters.side_effect": lambda: iter([mock.Mock(device=torch.device("cuda"))])})
    with (
        mock.patch("vllm.LLM") as llm,
        mock.patch("torch.distributed.is_initialized", return_value=together > 1),
        held(os.environ, user),
        held(os.environ, process_environment(config)),
    ):
        llm.return_value.collective_rpc.return_value = [""]
        llm.return_value.apply_model.return_value = [None]
        VLLMEngine(config, run, on_gpu, MAX_LENGTH).close()
    calls = [str(call) for call in llm.return_value.mock_calls]
    told = ("sleep", "release", "wake", "shutdown")
    return llm.call_args.kwargs, [call for call in calls if any(word in call for word in told)]


def too_little_memory(run: Path, model: Any) -> list[str]:
    """What an engine says where vLLM finds too little memory, in vLLM's words, and where it finds something else."""
    from vllm.v1.core.kv_cache_utils import _check_enough_kv_cache_memory as check

    from grpo_core.config.files import load_config
    from grpo_core.rollout.vllm.colocated_engine import VLLMEngine

    said = []
    for construct in (
        lambda **_: check(-1, lambda: 10, MAX_LENGTH, lambda _: 1),
        lambda **_: check(5, lambda: 10, MAX_LENGTH, lambda _: 1),
        lambda **_: int("no model"),
    ):
        with mock.patch("vllm.LLM", construct):
            try:
                VLLMEngine(load_config(run / "config.toml"), run, model, MAX_LENGTH)
            except ValueError as error:  # a GrpoError is none
                said.append(f"ValueError: {error}")
            except Exception as error:
                said.append(f"{type(error).__name__}: {error}")
    return said


def resume(run: Path, other: Path) -> dict[str, list[Any]]:
    """The end of `sample`, in a process that has done nothing before it."""
    from grpo_core.model.loading import load_model

    engine, _, tokenizer = start(run)
    engine.sync_weights(load_model(other))
    requests = [Request(tokenizer(prompt)["input_ids"], 6, seed=1000 * i) for i, prompt in enumerate(PROMPTS)]
    free = Sampling(6, temperature=0.7)
    return {
        "synced": sampled(engine.generate(requests, free)),
        "long synced": sampled(engine.generate(long_requests(), free)),
    }


@dataclass(frozen=True)
class Drawn:
    """What `sample` returned, and the folders of the model before and after."""

    run: Path
    folder: Path
    other: Path
    values: dict[str, list[Any]]


@pytest.fixture(scope="module")
def drawn(tmp_path_factory: pytest.TempPathFactory) -> Drawn:
    tmp_path = tmp_path_factory.mktemp("vllm")
    folder = make_model(tmp_path / "model", initializer_range=0.2, max_position_embeddings=512)
    other = make_model(tmp_path / "other", initializer_range=0.3, max_position_embeddings=512)
    run = make_run(tmp_path / "run", config_values(folder, tmp_path, engine="vllm"))
    return Drawn(run, folder, other, forked.call(sample, run, other))


def test_samples_depend_on_the_seed_alone_and_carry_the_models_log_probabilities(drawn: Drawn) -> None:
    from transformers import AutoModelForCausalLM, AutoTokenizer

    names = ["first", "again", "singles", "reseeded", *TRUNCATED, "greedy", "long", "synced", "long synced"]
    ids = {name: [completion.ids for completion in drawn.values[name]] for name in names}
    assert ids["again"] == ids["singles"] == ids["first"]
    assert ids["reseeded"] != ids["first"] != ids["synced"]
    assert len({tuple(completion) for completion in ids["first"][:6]}) > 1
    assert drawn.values["none"] == []

    tokenizer = AutoTokenizer.from_pretrained(drawn.folder)
    short = [tokenizer(prompt)["input_ids"] for prompt in PROMPTS for _ in range(6)]
    long = [request.prompt_ids for request in long_requests() for _ in range(2)]
    models = {path: AutoModelForCausalLM.from_pretrained(path).eval() for path in (drawn.folder, drawn.other)}
    for name in names:
        model = models[drawn.other if "synced" in name else drawn.folder]
        prompts = long if "long" in name else short
        for prompt, completion in zip(prompts, drawn.values[name], strict=True):
            tokens = completion.ids
            assert completion.truncated == (tokens[-1] != tokenizer.eos_token_id)
            assert len(tokens) == 6 or not completion.truncated
            greedy = Sampling(6, temperature=1.0, top_k=1)
            sampling = {**TRUNCATED, "greedy": greedy}.get(name, Sampling(6, temperature=0.7))
            penalty = sampling.repetition_penalty
            of_each = plain_distributions(model, prompt + tokens, sampling.temperature, penalty)[len(prompt) - 1 :]
            left = Sampling(6) if name == "greedy" else sampling
            for token, logprob, distribution in zip(tokens, completion.logprobs, of_each.tolist(), strict=True):
                expected = logprob_when_drawn(token, distribution, left)
                assert logprob == pytest.approx(expected, abs=1e-5 if name in TRUNCATED else 1e-4)
                assert token in can_be_drawn(distribution, sampling)


def test_a_text_to_stop_at_ends_a_completion_with_its_last_token(drawn: Drawn) -> None:
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(drawn.folder)
    prompts = [tokenizer(prompt)["input_ids"] for prompt in PROMPTS for _ in range(6)]
    decode = partial(tokenizer.decode, skip_special_tokens=True)
    assert drawn.values["stopped"] == cut(drawn.values["first"], STOP, prompts, decode) != drawn.values["first"]


def test_conversations_sampled_together_have_the_tokens_of_each_alone_and_keep_what_was_computed(drawn: Drawn) -> None:
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(drawn.folder).eval()
    together, alone = drawn.values["conversations"], drawn.values["turn by turn"]
    assert {len(turns) for turns in together} == {1, 2, 3, 4}
    assert [[turn.ids for turn in turns] for turns in together] == [[turn.ids for turn in turns] for turns in alone]
    assert any(turn.truncated for turns in together for turn in turns)
    for play_, turns in zip(conversations(len(together)), together, strict=True):
        asked = next(play_)
        for turn in turns:
            expected = plain_logprobs(model, asked.ids + turn.ids, 0.7)[len(asked.ids) - 1 :]
            assert turn.logprobs == pytest.approx(expected, abs=1e-4)
            with suppress(StopIteration):
                asked = play_.send(turn)
    block = 128
    assert drawn.values["cached"] == [block] * 8, "every conversation begins with what is computed already"
    assert drawn.values["cached synced"] == [0] + [block] * 7, "and forgets it with the weights only"
