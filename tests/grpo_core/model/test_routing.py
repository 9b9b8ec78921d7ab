"""The experts that a mixture's routers choose: held against what the experts themselves are given, for families whose
routers differ, and the loss that balances them against transformers'."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers.models.mixtral.modeling_mixtral import load_balancing_loss_func

from grpo_core.errors import ConfigError
from grpo_core.model.loading import load_model
from grpo_core.model.policy import Policy
from grpo_core.model.routing import balance_loss, choice_counts, reading, routers_of
from grpo_core.model.sequences import Sequences, number_prompts, pad
from grpo_core.rollout.transformers_engine import TransformersEngine
from grpo_core.rollout.types import Completion, Request, Sampling
from tests.conftest import make_model, make_tokenizer

TWO = {"num_experts_per_tok": 2}
DEEPSEEK = {"kv_lora_rank": 16, "q_lora_rank": 16, "qk_rope_head_dim": 16, "qk_nope_head_dim": 16, "v_head_dim": 32}
LINEAR = {f"linear_num_{kind}_heads": 2 for kind in ("key", "value")}
LINEAR |= {f"linear_{kind}_head_dim": 16 for kind in ("key", "value")}
HYBRID = {**LINEAR, "layer_types": ["linear_attention", "full_attention"], "shared_expert_intermediate_size": 16}
FINE = {**TWO, "moe_intermediate_size": 16, "head_dim": 32}
FAMILIES: dict[str, dict[str, Any]] = {
    "Qwen3Moe": {**FINE, "num_experts": 8},
    "Mixtral": {**TWO, "num_local_experts": 8},
    "GptOss": {**TWO, "num_local_experts": 8, "head_dim": 32},
    "DeepseekV3": {
        **TWO,
        **DEEPSEEK,
        "n_routed_experts": 8,
        "n_group": 4,
        "topk_group": 2,
        "moe_intermediate_size": 16,
        "first_k_dense_replace": 1,
        "num_hidden_layers": 3,
        "num_key_value_heads": 2,
    },
    "Glm4Moe": {**FINE, "n_routed_experts": 8, "n_group": 2, "topk_group": 1, "first_k_dense_replace": 0},
    "Qwen3_5MoeText": {**FINE, **HYBRID, "num_experts": 8},
    "GraniteMoe": {**TWO, "num_local_experts": 8},
}
UNREADABLE = {"Jamba": {**TWO, "num_experts": 8}, "Phimoe": {**TWO, "num_local_experts": 8}, "JetMoe": TWO}
PROMPTS, COPIES = [[3, 4, 5, 6, 7], [8, 9]], 3


def _model(folder: Path, family: str) -> Any:
    model = load_model(make_model(folder, family, **{**FAMILIES, **UNREADABLE}[family]))
    torch.manual_seed(1)
    for name, values in model.named_buffers():
        if name.endswith("bias"):  # by which DeepSeek's routers choose, and do not weigh
            values += 0.1 * torch.rand_like(values)
    return model


@contextmanager
def _experts_given(model: Any) -> Iterator[list[Tensor]]:
    """Experts of each token, (N, K), as they are given to each layer's experts."""
    given: list[Tensor] = []

    def note(module: Any, arguments: tuple[Any, ...]) -> None:
        chosen = [it for it in arguments if isinstance(it, Tensor) and not it.is_floating_point()]
        given.append(chosen[0].sort(-1).values)

    found = [
        module for name, module in model.named_modules() if name.endswith((".experts", "block_sparse_moe.experts"))
    ]
    hooks = [module.register_forward_pre_hook(note) for module in found]
    try:
        yield given
    finally:
        for hook in hooks:
            hook.remove()


def _sampled(model: Any) -> list[tuple[list[int], Completion]]:
    engine = TransformersEngine(model, make_tokenizer())
    engine.routers = routers_of(model)
    requests = [Request(ids, COPIES, seed) for ids, seed in zip(PROMPTS, (1, 20), strict=True)]
    finished: dict[int, list[Completion]] = {}
    for some in engine.generate(requests, Sampling(max_tokens=9, temperature=1.0)):
        finished |= dict(some)
    return [(ids, completion) for number, ids in enumerate(PROMPTS) for completion in finished[number]]


def _sequences(sampled: list[tuple[list[int], Completion]]) -> Sequences:
    routes = [torch.as_tensor(completion.routes) for _, completion in sampled]
    return Sequences(
        pad([ids + completion.ids for ids, completion in sampled], torch.int64),
        torch.tensor([len(ids) for ids, _ in sampled]),
        torch.tensor([len(completion.ids) for _, completion in sampled]),
        number_prompts(ids for ids, _ in sampled),
        torch.nn.utils.rnn.pad_sequence(routes, batch_first=True),
    )


@pytest.mark.parametrize("family", FAMILIES)
def test_the_engine_gives_the_experts_that_each_token_went_through(family: str, tmp_path: Path) -> None:
    model = _model(tmp_path, family)
    sampled = _sampled(model)
    assert len({len(completion.ids) for _, completion in sampled}) > 1, "some rows leave before others"
    for ids, completion in sampled:
        with torch.no_grad(), _experts_given(model) as given:
            model(input_ids=torch.tensor([ids + completion.ids]), use_cache=False)
        assert completion.routes is not None
        assert completion.routes.shape == (len(ids + completion.ids), 2 * len(given))
        found = torch.as_tensor(completion.routes).unflatten(1, (-1, 2)).sort(-1).values
        assert torch.equal(found[:-1], torch.stack(given, 1)[:-1]), "the last token is no input"


@pytest.mark.parametrize("packs", [True, False], ids=["packed", "padded"])
@pytest.mark.parametrize("family", FAMILIES)
def test_replayed_experts_are_taken_by_another_router_too_and_the_same_router_gives_the_same(
    family: str, packs: bool, tmp_path: Path
) -> None:
    model = _model(tmp_path, family)
    sampled = _sampled(model)
    sequences, policy = _sequences(sampled), Policy(model, 1.0)
    policy.packs &= packs
    policy.routers, policy.replays_routes = routers_of(model), True
    inputs = policy.prepare(sequences)
    with policy.routing(inputs) as seen, torch.no_grad():
        logprobs, _ = policy(inputs)
        assert not policy.routing_difference(seen, inputs).any()  # type: ignore[union-attr]
    for row, (_, completion) in enumerate(sampled):
        expected = torch.tensor(completion.logprobs)
        torch.testing.assert_close(logprobs[row, : len(expected)], expected, atol=1e-4, rtol=1e-4)

    routers = [module for module in model.modules() if getattr(module.forward, "func", None) is not None]
    torch.manual_seed(2)
    for weight in {id(it): it for router in routers for it in router.parameters(recurse=False)}.values():
        weight.data = torch.randn_like(weight)
    with torch.no_grad(), policy.routing(inputs), _experts_given(model) as given:
        policy(inputs)
    _assert_taken(given, inputs.routes)
    policy.replays_routes = False
    with torch.no_grad(), policy.routing(inputs) as seen:
        other, _ = policy(inputs)
        share = policy.routing_difference(seen, inputs)
    assert share is not None and share.sum() / (share >= 0).sum() > 0.2
    assert not torch.allclose(other, logprobs, atol=1e-2)


def _assert_taken(given: list[Tensor], routes: Tensor | None) -> None:
    assert routes is not None
    expected = routes.unflatten(1, (-1, 2)).sort(-1).values
    for place, taken in enumerate(given):
        assert torch.equal(taken, expected[:, place].long())


def test_recomputed_layers_replay_the_same_experts(tmp_path: Path) -> None:
    model = _model(tmp_path, "Qwen3Moe")
    sequences, policy = _sequences(_sampled(model)), Policy(model, 1.0)
    policy.routers, policy.replays_routes = routers_of(model), True
    for layer in model.model.layers:
        torch.nn.init.normal_(layer.mlp.gate.weight)
    inputs = policy.prepare(sequences)

    def gradients() -> list[Tensor]:
        with policy.routing(inputs), policy.recomputing():
            policy(inputs)[0].sum().backward()
        found = [weight.grad.clone() for weight in model.parameters() if weight.grad is not None]
        policy.zero_grad()
        return found

    kept = gradients()
    policy.recompute(2)
    torch.testing.assert_close(gradients(), kept)


@pytest.mark.parametrize("family", ["Qwen3Moe", "Mixtral", "GptOss", "GraniteMoe", "Qwen3_5MoeText"])
def test_the_loss_of_all_passes_is_that_of_transformers_over_the_tokens_that_the_loss_is_on(
    family: str, tmp_path: Path
) -> None:
    model = _model(tmp_path, family)
    sequences, policy = _sequences(_sampled(model)), Policy(model, 1.0)
    policy.routers = routers_of(model)
    assert policy.routers is not None
    at = torch.arange(sequences.input_ids.shape[1])
    ends = sequences.lengths[:, None] - 1
    predicts = (at >= sequences.prompt_lengths[:, None] - 1) & (at < ends)
    with reading(policy.routers) as seen:
        model(input_ids=sequences.input_ids, use_cache=False)
    logits = tuple(each for each, _ in seen.values())
    expected = load_balancing_loss_func(logits, 8, 2, predicts.int())
    weights = [weight for weight in model.parameters() if weight.requires_grad]
    slopes = torch.autograd.grad(expected, weights, allow_unused=True)

    for packs, cuts in [
        (policy.packs, [[0, 1, 2, 3, 4, 5]]),
        (policy.packs, [[0, 3], [1, 2, 5], [4]]),
        (False, [[5, 0], [1, 2, 3, 4]]),
    ]:
        policy.packs = packs
        passes = [policy.prepare(sequences.take(torch.tensor(rows))) for rows in cuts]
        ones = [torch.ones(len(inputs.places)) for inputs in passes]
        counts = torch.zeros(8, dtype=torch.float64)
        for inputs, mask in zip(passes, ones, strict=True):
            with policy.routing(inputs) as seen, torch.no_grad():
                policy(inputs)
            counts += choice_counts(seen, inputs.tokens.predicts, mask, 8)
        found = torch.zeros(())
        for inputs, mask in zip(passes, ones, strict=True):
            with policy.routing(inputs) as seen:
                policy(inputs)
                found = found + balance_loss(seen, inputs.tokens.predicts, mask, counts)
        torch.testing.assert_close(found, expected)
        own = torch.autograd.grad(found, weights, allow_unused=True)
        for mine, theirs in zip(own, slopes, strict=True):
            torch.testing.assert_close(mine, theirs, atol=1e-5, rtol=1e-3)


@pytest.mark.parametrize("family", UNREADABLE)
def test_a_family_whose_routers_cannot_be_read_is_refused_by_name(family: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=f"the experts that {family}ForCausalLM chooses cannot be read"):
        routers_of(_model(tmp_path, family))


def test_a_model_without_experts_has_no_routers(model_folder: Path) -> None:
    assert routers_of(load_model(model_folder)) is None


def test_recorded_experts_of_another_model_are_refused_if_they_are_to_be_taken_and_else_not_compared(
    tmp_path: Path,
) -> None:
    policy = Policy(_model(tmp_path, "Mixtral"), 1.0)
    policy.routers = routers_of(policy.model)
    assert policy.routers is not None
    bare = Sequences(torch.tensor([[3, 4, 5]]), torch.tensor([1]), torch.tensor([2]), torch.tensor([0]))
    inputs = policy.prepare(replace(bare, routes=torch.zeros(1, 3, policy.routers.width + 1, dtype=torch.int16)))
    with policy.routing(inputs) as seen:
        policy(inputs)
    assert policy.routing_difference(seen, inputs) is None
    policy.replays_routes = True
    with (
        pytest.raises(ConfigError, match=r"they are another model's\. Set algorithm.routing_replay to false"),
        policy.routing(inputs),
    ):
        pass
