"""vLLM for real, on the CPU: after every weight update it samples from the trainer's policy."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from grpo_core.rollout.types import Sampling
from tests import forked
from tests.conftest import config_values, make_model, make_run
from tests.grpo_core.rollout.sampling import sampled
from tests.grpo_core.rollout.vllm_engine import PACKED, long_requests, plain_logprobs, sequences, start

pytestmark = pytest.mark.served


@pytest.mark.e2e
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
    return distances, how


@pytest.mark.parametrize(
    ("architecture", "tied"),
    [
        ("Qwen3", False),
        *(
            pytest.param(*case, marks=pytest.mark.e2e)
            for case in [("Qwen2", True), ("Qwen2", False), ("Qwen3", True), ("Llama", True), ("Llama", False)]
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


@pytest.mark.e2e
def test_a_packed_bf16_engine_is_reloaded(tmp_path: Path) -> None:
    """Without AVX-512, vLLM packs nothing, and its weights are written to."""
    options = {"tie_word_embeddings": True, "max_position_embeddings": 512, **PACKED}
    folder = make_model(tmp_path / "model", initializer_range=0.1, **options)
    run = make_run(tmp_path / "run", config_values(folder, tmp_path, engine="vllm", mixed_precision="bf16"))
    (_, *others), how = forked.call(follow, run)
    assert set(how) == {"reloaded" if "avx512f" in Path("/proc/cpuinfo").read_text() else "copied"}
    assert all(after < before / 3 for before, after in zip(others[::2], others[1::2], strict=True))


def apply_head(run: Path) -> list[float]:
    """Relative distances of an engine's logits from the exact ones of the same states, before and after an update."""
    import torch

    engine, model, _ = start(run)
    states, distances = torch.randn(5, PACKED["hidden_size"]).bfloat16(), []
    for _ in range(2):
        (logits,) = engine.llm.apply_model(lambda it: it.compute_logits(states))
        exact = states.double() @ model.get_output_embeddings().weight.detach().bfloat16().double().T
        distances.append(float((logits - exact).norm() / exact.norm()))
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.add_(0.1 * torch.randn_like(parameter))
        engine.sync_weights(model)
    return distances


@pytest.mark.parametrize("tied", [True, pytest.param(False, marks=pytest.mark.e2e)])
def test_the_logits_of_an_engine_in_bf16_are_float32_and_follow_an_update(tmp_path: Path, tied: bool) -> None:
    folder = make_model(tmp_path / "model", tie_word_embeddings=tied, max_position_embeddings=512, **PACKED)
    run = make_run(tmp_path / "run", config_values(folder, tmp_path, engine="vllm", mixed_precision="bf16"))
    assert max(forked.call(apply_head, run)) < 1e-6


def adapt(run: Path) -> list[dict[str, Any]]:
    """What an engine says of adapters that it was and was not handed, and what the model itself says."""
    import torch

    engine, model, _ = start(run)
    requests, sampling = long_requests()[:4], Sampling(9, temperature=0.7)
    steps: list[dict[str, Any]] = []
    frozen = [parameter for parameter in model.parameters() if not parameter.requires_grad]

    def shares() -> bool:
        (places,) = engine.llm.apply_model(lambda it: {each.untyped_storage().data_ptr() for each in it.parameters()})
        return all(parameter.untyped_storage().data_ptr() in places for parameter in frozen)

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
                "shares the base": shares(),
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
    return steps


@pytest.mark.parametrize("in_4bit", [False, pytest.param(True, marks=pytest.mark.e2e)])
def test_the_engine_follows_an_adapter_over_a_base_that_stays(tmp_path: Path, in_4bit: bool) -> None:
    """The engine has the weights that the codes of a 4-bit base stand for."""
    folder = make_model(
        tmp_path / "model", tie_word_embeddings=True, initializer_range=0.1, max_position_embeddings=512, **PACKED
    )
    keys = {"use_peft": True, "lora_r": 5, "lora_alpha": 15, "load_in_4bit": in_4bit}
    values = config_values(folder, tmp_path, engine="vllm", **keys)
    steps = forked.call(adapt, make_run(tmp_path / "run", values))
    names = ["base", "fresh adapter", "changed 0", "synced 0", "changed 1", "synced 1", "changed 2", "synced 2"]
    assert [step["name"] for step in steps] == names
    assert [step["loaded"] for step in steps] == [0] + [1] * 7
    assert {step["shares the base"] for step in steps} == {not in_4bit}

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


def merge(run: Path) -> tuple[list[float], list[float], list[str]]:
    """Distances of an engine's scores from those of a model, fresh and after each of two updates: before the engine
    gets the weights, and when it has them; and how it got them."""
    import torch

    from grpo_core.model.loading import trainable_state

    engine, model, _ = start(run)

    def distance() -> float:
        rows = zip(
            engine.compute_logprobs(sequences()), (plain_logprobs(model, ids) for ids in sequences()), strict=True
        )
        return max(abs(a - b) for row in rows for a, b in zip(*row, strict=True))

    before, after, how = [], [], []
    for update in range(3):
        before.append(distance())
        how.append(engine.sync_weights(model))
        after.append(distance())
        torch.manual_seed(update)
        for tensor in trainable_state(model).values():
            tensor += 0.05 * torch.randn_like(tensor)
    return before, after, how


@pytest.mark.e2e
@pytest.mark.parametrize("tied", [True, False])
def test_the_engine_gets_whole_weights_where_embedding_and_head_are_trained_beside_an_adapter(
    tmp_path: Path, tied: bool
) -> None:
    options = {"tie_word_embeddings": tied, "max_position_embeddings": 512, **PACKED}
    folder = make_model(tmp_path / "model", initializer_range=0.1, **options)
    keys = {"use_peft": True, "lora_r": 5, "lora_alpha": 15, "lora_modules_to_save": ["embed_tokens", "lm_head"]}
    _expect_merged(make_run(tmp_path / "run", config_values(folder, tmp_path, engine="vllm", **keys)), 1e-4)


LORA = {"use_peft": True, "lora_r": 5, "lora_alpha": 15}


@pytest.mark.e2e
@pytest.mark.parametrize(
    ("architecture", "keys"),
    [
        ("Qwen3Moe", {}),
        ("Qwen3Moe", LORA),
        ("Qwen3Moe", {**LORA, "mixed_precision": "bf16"}),
        ("Qwen3Moe", {**LORA, "lora_target_modules": ["q_proj", "v_proj"]}),
        ("Mixtral", LORA),
        ("Olmoe", LORA),
    ],
)
def test_the_engine_follows_a_mixture_of_experts(tmp_path: Path, architecture: str, keys: dict[str, Any]) -> None:
    """transformers fuses the experts, vLLM packs them; an adapter is merged into them."""
    experts = {"num_local_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 64, "head_dim": 32}
    options = {"max_position_embeddings": 512, **PACKED, **experts}
    folder = make_model(tmp_path / "model", architecture, initializer_range=0.1, **options)
    bound = 0.3 if "mixed_precision" in keys else 1e-4
    _expect_merged(make_run(tmp_path / "run", config_values(folder, tmp_path, engine="vllm", **keys)), bound)


def _expect_merged(run: Path, bound: float) -> None:
    """An engine scores as the model does after each update, and did not before."""
    before, after, how = forked.call(merge, run)
    assert how == ["reloaded"] * 3
    assert max(after) < bound
    assert min(before[1:]) > 3 * bound
