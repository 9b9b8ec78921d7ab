"""vLLM for real, on the CPU in float32: after every weight update it samples from the trainer's policy."""

from __future__ import annotations

import math
import random
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest import mock

import pytest

from grpo_core.errors import TrainingError
from grpo_core.rollout.types import Request, Sampling
from tests import forked
from tests.conftest import config_values, make_model, make_run
from tests.grpo_core.rollout.sampling import sampled

pytestmark = pytest.mark.slow

# A size at which vLLM packs its linear layers, so that the packed copy of a tied head goes stale on a reload.
PACKED = {"vocab_size": 2048, "hidden_size": 128, "intermediate_size": 256, "num_attention_heads": 4}


def test_the_engine_follows_a_tied_head_through_every_update(tmp_path: Path) -> None:
    model = make_model(tmp_path / "model", tie_word_embeddings=True, initializer_range=0.1, **PACKED)
    values = config_values(model, tmp_path, max_steps=5)
    values["rewards"] = [{"function": "tests.grpo_core.training.test_loop:parity"}]
    values["rollout"] |= {"engine": "vllm", "temperature": 0.8, "top_p": 0.9, "top_k": 500}
    run = make_run(tmp_path / "run", values)
    steps = forked.train(run)
    assert len(steps) == 5
    assert [step["sampling/sampling_logp_difference/max"] < 1e-4 for step in steps] == [True] * 5
    assert [step["sampling/importance_sampling_ratio/min"] > 0.999 for step in steps] == [True] * 5
    assert all(step["grad_norm"] > 0 for step in steps)


PROMPTS = ["1+1=", "12+34=", "7"]
MAX_LENGTH = 300
TRUNCATED = {
    "top_k": Sampling(6, temperature=0.7, top_k=3),
    "top_p": Sampling(6, temperature=1.3, top_p=0.6),
    "both": Sampling(6, temperature=0.7, top_k=5, top_p=0.8),
}


def long_requests() -> list[Request]:
    """Prompts that fill blocks of vLLM's prefix cache (128 tokens on a CPU), together more than one step takes (4,096).

    Some begin alike.
    """
    draw = random.Random(0)
    starts = [[draw.randrange(3, 13) for _ in range(150)] for _ in range(12)]
    prompts = [start + [draw.randrange(3, 13) for _ in range(140)] for start in starts for _ in range(2)]
    return [Request(prompt, 2, seed=50_000 + 100 * i) for i, prompt in enumerate(prompts)]


def sequences() -> list[list[int]]:
    """What is scored: from one token to all that an engine takes."""
    longest = [*long_requests()[0].prompt_ids, *range(3, 12)]
    assert len(longest) == MAX_LENGTH - 1
    return [longest, longest[:150], longest[40:57], longest[7:9], longest[:1]]


def plain_logprobs(model: Any, ids: list[int], temperature: float = 1.0) -> list[float]:
    """Log-probability of each token but the first, from one forward pass without anything around it."""
    return _plain_distributions(model, ids, temperature)[range(len(ids) - 1), ids[1:]].tolist()


def _plain_distributions(model: Any, ids: list[int], temperature: float) -> Any:
    """Log-probabilities of what comes after each token but the last. (T - 1, V)"""
    import torch

    with torch.no_grad():
        return (model(torch.tensor([ids])).logits[0, :-1] / temperature).log_softmax(-1)


def can_be_drawn(model: Any, ids: list[int], sampling: Sampling) -> list[bool]:
    """Whether top-k and top-p leave each token but the first, given those before it."""
    found = []
    for token, logprobs in zip(ids[1:], _plain_distributions(model, ids, sampling.temperature).tolist(), strict=True):
        ordered = sorted(range(len(logprobs)), key=lambda i: -logprobs[i])[: sampling.top_k or None]
        p = [math.exp(logprobs[i]) for i in ordered]
        needed = next(n for n in range(1, len(p) + 1) if n == len(p) or sum(p[:n]) >= sampling.top_p * sum(p))
        found.append(token in ordered[:needed])
    return found


def start(run: Path) -> tuple[Any, Any, Any]:
    """The engine of a run directory's configuration, the model it was made for, the tokenizer."""
    import torch

    from grpo_core.config.files import load_config
    from grpo_core.data.prompts import load_tokenizer
    from grpo_core.model.loading import load_model, with_adapter
    from grpo_core.rollout.factory import make_engine

    config = load_config(run / "config.toml")
    torch.manual_seed(0)
    model, tokenizer = with_adapter(load_model(config.model.name_or_path), config.model), load_tokenizer(config.model)
    return make_engine(config, config.model.name_or_path, model, tokenizer, MAX_LENGTH), model, tokenizer


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
        "none": sampled(engine.generate([], free)),
        "long": sampled(engine.generate(long_requests(), free)),
    }
    scores = {"base scores": engine.compute_logprobs(sequences())}
    model.load_state_dict(load_model(other).state_dict())
    engine.sync_weights(model)
    scores["synced scores"] = engine.compute_logprobs(sequences())
    drawn["synced"] = sampled(engine.generate(requests, free))
    drawn["long synced"] = sampled(engine.generate(long_requests(), free))
    found = {"lent": lend(engine, model, requests, free), "unforgotten": hold_cache(engine, model, requests)}
    engine.close()
    others = {"second runner": second_runner(), "refusal": refusal(run, model), "on a GPU": start_on_a_gpu(run)}
    return drawn | scores | found | others


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


def start_on_a_gpu(run: Path) -> tuple[dict[str, Any], list[str]]:
    """The options with which vLLM is started for a model on a GPU, and what it is told then."""
    import torch

    from grpo_core.config.files import load_config
    from grpo_core.rollout.vllm.colocated import VLLMEngine

    on_gpu: Any = mock.Mock(**{"parameters.side_effect": lambda: iter([mock.Mock(device=torch.device("cuda"))])})
    with mock.patch("vllm.LLM") as llm:
        llm.return_value.collective_rpc.return_value = [""]
        llm.return_value.apply_model.return_value = [None]
        VLLMEngine(load_config(run / "config.toml"), run, on_gpu, MAX_LENGTH)
    calls = [str(call) for call in llm.return_value.mock_calls]
    return llm.call_args.kwargs, [call for call in calls if "sleep" in call or "release" in call or "wake" in call]


def second_runner() -> list[Any]:
    """What the sampler of vLLM's model runner V2, which needs a GPU, is given to truncate, draws from, and reports."""
    import torch
    from vllm.v1.worker.gpu.sample import sampler as module

    from grpo_core.rollout.vllm.logprobs import ignore_truncation

    sampler: Any = module.Sampler.__new__(module.Sampler)
    sampler.use_fp64_gumbel, sampler.sampling_states = False, mock.Mock()
    assert ignore_truncation(mock.Mock(sampler=sampler)) == ""
    found = []
    for top_k in (None, torch.tensor([2, 3])):
        logits = torch.arange(10.0).reshape(2, 5)
        with mock.patch.object(module, "gumbel_sample", side_effect=lambda truncated, *_, **__: truncated) as draw:
            _, reported = sampler._sample_random(logits, None, None, None, top_k, None, False)
        found.append([draw.call_args.args[0].isfinite().sum(1).tolist(), reported.tolist()])
    return found


def refusal(run: Path, model: Any) -> list[str]:
    """What an engine with a sampler that is not known says to a configuration without truncation, and to one with."""
    from grpo_core.config.files import load_config
    from grpo_core.rollout.vllm.colocated import VLLMEngine

    said = []
    for overrides in ([], ["rollout.top_p=0.9"]):
        with mock.patch("vllm.LLM") as llm:
            llm.return_value.collective_rpc = lambda function: [function(mock.Mock(model_runner=mock.Mock(sampler=3)))]
            llm.return_value.apply_model.return_value = [None]
            try:
                VLLMEngine(load_config(run / "config.toml", overrides), run, model, MAX_LENGTH)
                said.append("")
            except ValueError as error:
                said.append(str(error))
    return said


def resume(run: Path, other: Path) -> dict[str, list[Any]]:
    """The end of `sample`, in a process that has done nothing before it."""
    from grpo_core.model.loading import load_model

    engine, _, tokenizer = start(run)
    engine.sync_weights(load_model(other))
    requests = [Request(tokenizer(prompt)["input_ids"], 6, seed=1000 * i) for i, prompt in enumerate(PROMPTS)]
    free = Sampling(6, temperature=0.7)
    drawn = {
        "synced": sampled(engine.generate(requests, free)),
        "long synced": sampled(engine.generate(long_requests(), free)),
    }
    engine.close()
    return drawn


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
            expected = plain_logprobs(model, prompt + tokens, sampling.temperature)[len(prompt) - 1 :]
            assert completion.logprobs == pytest.approx(expected, abs=1e-5 if name in TRUNCATED else 1e-4)
            assert all(can_be_drawn(model, prompt + tokens, sampling)[len(prompt) - 1 :])


def test_vllms_second_model_runner_draws_from_truncated_logits_and_reports_the_whole_ones(drawn: Drawn) -> None:
    whole = [[0.0, 1.0, 2.0, 3.0, 4.0], [5.0, 6.0, 7.0, 8.0, 9.0]]
    assert drawn.values["second runner"] == [[[5, 5], whole], [[2, 3], whole]]


def test_truncated_sampling_is_refused_with_a_sampler_that_is_not_known(drawn: Drawn) -> None:
    whole, truncated = drawn.values["refusal"]
    assert whole == ""
    assert "rollout.top_p=0.9 and rollout.top_k=0: with them this vLLM cannot give" in truncated
    assert "its sampler is builtins.int, which is not known here; set top_p to 1 and top_k to 0" in truncated


def test_the_memory_of_the_kv_cache_is_lent_whenever_the_engine_rests(drawn: Drawn) -> None:
    """No step is made while it is lent; weights are never put to sleep."""
    notes, is_lent = drawn.values["lent"], False
    assert notes.count("sample") == 2 and notes.count("score") == 1 and notes.count("step") > 10
    for note in notes:
        if isinstance(note, list):
            assert note == (["wake_up", ["kv_cache"]] if is_lent else ["discard", ["kv_cache"]])
            is_lent = not is_lent
        else:
            assert is_lent == (note != "step")
    assert not is_lent  # the last is the test's own
    assert sum(isinstance(note, list) for note in notes) == 1 + 2 * 4 + 1


def test_on_a_gpu_vllm_is_started_so_that_its_kv_cache_can_be_lent_and_it_is(drawn: Drawn) -> None:
    options, told = drawn.values["on a GPU"]
    assert options["enable_sleep_mode"] is True
    assert told == ["call.sleep(level=0)", "call.release_kv_cache_memory()"]


def test_weights_are_handed_over_to_an_engine_at_rest_that_forgets_what_it_computed(drawn: Drawn) -> None:
    how, left, said, afterwards = drawn.values["unforgotten"]
    assert (how, left, afterwards) == ("shared", False, "shared")
    assert "vLLM still holds blocks of its KV cache after its last request" in said


def test_scores_are_those_of_the_weights_last_synced(drawn: Drawn) -> None:
    from transformers import AutoModelForCausalLM

    for name, folder in (("base scores", drawn.folder), ("synced scores", drawn.other)):
        model = AutoModelForCausalLM.from_pretrained(folder).eval()
        for ids, scores in zip(sequences(), drawn.values[name], strict=True):
            assert scores == pytest.approx(plain_logprobs(model, ids), abs=1e-4)


def test_a_new_process_draws_the_same_bits_as_one_that_has_served_before(drawn: Drawn) -> None:
    resumed = forked.call(resume, drawn.run, drawn.other)
    assert len(resumed["long synced"]) == 48
    assert resumed == {name: drawn.values[name] for name in resumed}


def follow(run: Path) -> tuple[list[float], list[str]]:
    """Distances of an engine's scores from the model's, before and after it takes each of several updates, and how each
    got there."""
    import copy

    import torch

    engine, model, _ = start(run)

    def distance(model: Any) -> float:
        rows = zip(
            engine.compute_logprobs(sequences()), (plain_logprobs(model, ids) for ids in sequences()), strict=True
        )
        return max(abs(a - b) for row in rows for a, b in zip(*row, strict=True))

    def change(model: Any) -> None:
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.add_(0.1 * torch.randn_like(parameter))

    distances, how = [distance(model)], []
    another = copy.deepcopy(model)
    for updated in (model, model, another, model):
        change(updated)
        before = distance(updated)
        others = [(m, [p.clone() for p in m.parameters()]) for m in (model, another) if m is not updated]
        how.append(engine.sync_weights(updated))
        distances += [before, distance(updated)]
        for other, weights in others:
            assert all(torch.equal(p, kept) for p, kept in zip(other.parameters(), weights, strict=True))
    engine.close()
    return distances, how


@pytest.mark.parametrize(
    ("architecture", "tied"),
    [
        ("Qwen2", True),
        ("Qwen3", False),
        *(
            pytest.param(*case, marks=pytest.mark.e2e)
            for case in [("Qwen2", False), ("Qwen3", True), ("Llama", True), ("Llama", False)]
        ),
    ],
)
def test_an_update_is_there_as_it_is_made_and_another_models_by_copies(
    tmp_path: Path, architecture: str, tied: bool
) -> None:
    """Qwen2 has biases, Llama none, Qwen3 norms of heads."""
    options = {"tie_word_embeddings": tied, "max_position_embeddings": 512, **PACKED}
    folder = make_model(tmp_path / "model", architecture=architecture, initializer_range=0.1, **options)
    run = make_run(tmp_path / "run", config_values(folder, tmp_path, engine="vllm"))
    (first, *others), how = forked.call(follow, run)
    assert how == ["shared", "shared", "copied", "copied"]
    assert first < 1e-4
    assert [before > 0.1 for before in others[::2]] == [False, False, True, True]  # the third is of another model
    assert all(before < 1e-4 for before in others[:4:2])
    assert all(after < 1e-4 for after in others[1::2])


def test_a_packed_bf16_engine_is_reloaded(tmp_path: Path) -> None:
    options = {"tie_word_embeddings": True, "max_position_embeddings": 512, **PACKED}
    folder = make_model(tmp_path / "model", initializer_range=0.1, **options)
    run = make_run(tmp_path / "run", config_values(folder, tmp_path, engine="vllm", mixed_precision="bf16"))
    (_, *others), how = forked.call(follow, run)
    assert set(how) == {"reloaded"}
    assert all(after < before / 3 for before, after in zip(others[::2], others[1::2], strict=True))


def adapt(run: Path) -> list[dict[str, Any]]:
    """What an engine says of adapters that it was and was not handed, and what the model itself says."""
    import torch

    engine, model, _ = start(run)
    requests, sampling = long_requests()[:4], Sampling(9, temperature=0.7)
    steps = []

    def step(name: str) -> None:
        samples = sampled(engine.generate(requests, sampling))
        prompts = [request.prompt_ids for request in requests for _ in range(request.num_completions)]
        steps.append(
            {
                "name": name,
                "scores": engine.compute_logprobs(sequences()),
                "model's scores": [plain_logprobs(model, ids) for ids in sequences()],
                "samples": [sample.logprobs for sample in samples],
                "model's samples": [
                    plain_logprobs(model, prompt + sample.ids, 0.7)[len(prompt) - 1 :]
                    for prompt, sample in zip(prompts, samples, strict=True)
                ],
                "loaded": len(engine.llm.llm_engine.list_loras()),
            }
        )

    step("base")
    engine.sync_weights(model)
    step("fresh adapter")
    for i in range(3):
        for parameter in model.parameters():
            if parameter.requires_grad:
                torch.nn.init.normal_(parameter, std=0.1)
        step(f"changed {i}")
        engine.sync_weights(model)
        step(f"synced {i}")
    engine.close()
    return steps


def test_the_engine_follows_an_adapter_over_a_base_that_stays(tmp_path: Path) -> None:
    folder = make_model(
        tmp_path / "model", tie_word_embeddings=True, initializer_range=0.1, max_position_embeddings=512, **PACKED
    )
    values = config_values(folder, tmp_path, engine="vllm", use_peft=True, lora_r=5, lora_alpha=15)
    steps = forked.call(adapt, make_run(tmp_path / "run", values))
    names = ["base", "fresh adapter", "changed 0", "synced 0", "changed 1", "synced 1", "changed 2", "synced 2"]
    assert [step["name"] for step in steps] == names
    assert [step["loaded"] for step in steps] == [0] + [1] * 7

    def distance(step: dict[str, Any], other: dict[str, Any], what: str, whose: str) -> float:
        rows = zip(step[what], other[whose + what], strict=True)
        return max(abs(a - b) for row in rows for a, b in zip(*row, strict=True))

    for previous, step in zip([None, *steps], steps, strict=False):
        if step["name"].startswith("changed"):
            assert distance(step, previous, "scores", "") == 0
            assert distance(step, step, "scores", "model's ") > 0.1
        else:
            assert distance(step, step, "scores", "model's ") < 1e-4
            assert distance(step, step, "samples", "model's ") < 1e-4
    assert distance(steps[1], steps[0], "scores", "model's ") < 1e-4


def test_the_room_for_adapters_is_the_next_that_vllm_knows() -> None:
    from grpo_core.rollout.vllm.colocated import lora_rank

    assert [lora_rank(rank) for rank in (1, 8, 9, 300, 512)] == [8, 8, 16, 320, 512]
    with pytest.raises(ValueError, match="lora_r=513"):
        lora_rank(513)
