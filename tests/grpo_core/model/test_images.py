"""Policy and engine on prompts with images, held against transformers' own pass over the processor's tensors, one
sequence at a time."""

from __future__ import annotations

import copy
import random
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import Phase, given, settings
from hypothesis import strategies as st
from torch import Tensor

from grpo_core.config.inputs import ModelConfig
from grpo_core.errors import ConfigError
from grpo_core.model import images as module
from grpo_core.model.divergence import mean_kl
from grpo_core.model.images import image_ids
from grpo_core.model.loading import load_model, with_adapter
from grpo_core.model.policy import Policy
from grpo_core.model.saving import save_model
from grpo_core.model.sequences import Sequences, number_prompts, pad
from grpo_core.rollout.transformers_engine import TransformersEngine
from grpo_core.rollout.types import Request, Sampling
from tests.conftest import make_model, make_tokenizer
from tests.grpo_core.model.seeing import FAMILIES, make_seeing, plain_logits

families = pytest.mark.parametrize("family", FAMILIES)


def _prompt(images: Any, draw: random.Random, most: int = 3) -> list[int]:
    ids = [1]
    for _ in range(draw.randint(0, most)):
        ids += [draw.randrange(3, 80) for _ in range(draw.randint(0, 4))]
        ids += [92, *image_ids(images, draw.randrange(4)), 93]
    return ids + [draw.randrange(3, 80) for _ in range(draw.randint(1, 5))]


def _drawn(images: Any, seed: int, groups: int = 3, g: int = 2) -> tuple[list[list[int]], list[list[int]]]:
    """Prompts, each g times, and completions."""
    draw = random.Random(seed)
    prompts = [prompt for prompt in (_prompt(images, draw) for _ in range(groups)) for _ in range(g)]
    return prompts, [[draw.randrange(3, 80) for _ in range(draw.randint(1, 9))] for _ in prompts]


def _sequences(prompts: list[list[int]], completions: list[list[int]]) -> Sequences:
    together = [prompt + completion for prompt, completion in zip(prompts, completions, strict=True)]
    lengths = (torch.tensor([*map(len, rows)]) for rows in (prompts, completions))
    return Sequences(pad(together, torch.int64), *lengths, number_prompts(prompts))


def _plain(model: Any, prompt: list[int], completion: list[int], temperature: float = 1.0) -> tuple[Tensor, Tensor]:
    """Log-probabilities of the completion's tokens, and the entropies there."""
    logits = plain_logits(model, prompt + completion)[len(prompt) - 1 : -1] / temperature
    log_p = logits.log_softmax(-1)
    return log_p.gather(1, torch.tensor(completion)[:, None]).squeeze(1), -(log_p.exp() * log_p).sum(-1)


@families
@settings(max_examples=4, deadline=None, phases=[Phase.explicit, Phase.generate])
@given(seed=st.integers(0, 2**16), frozen=st.booleans())
def test_the_policy_is_transformers_own(family: str, seed: int, frozen: bool) -> None:
    """Log-probabilities, entropies, and gradients of all that is trained; the rest has none."""
    model = make_seeing(family, frozen=frozen)
    policy, plain = Policy(model, 0.7, max_length=200), copy.deepcopy(model)
    assert policy.packs == (family == "qwen2_5_vl")  # Gemma 3's image tokens attend to each other
    prompts, completions = _drawn(model.images, seed)
    logprobs, entropies = policy(policy.prepare(_sequences(prompts, completions)), entropy_gradient=True)
    (logprobs.sin() + entropies.cos()).sum().backward()
    total = torch.tensor(0.0)
    for row, (prompt, completion) in enumerate(zip(prompts, completions, strict=True)):
        expected = _plain(plain, prompt, completion, 0.7)
        for found, wanted in zip((logprobs[row], entropies[row]), expected, strict=True):
            torch.testing.assert_close(found[: len(completion)], wanted, rtol=0, atol=1e-5)
        n = logprobs.shape[1] - len(completion)
        total = total + expected[0].sin().sum() + expected[1].cos().sum() + n  # cos(0)
    total.backward()
    others = dict(plain.named_parameters())
    for name, parameter in model.named_parameters():
        of_text = "language_model" in name or "lm_head" in name
        if frozen and not of_text:
            assert parameter.grad is None and not parameter.requires_grad, name
        elif parameter.grad is None:
            assert others[name].grad is None, name
        else:
            scale = others[name].grad.abs().max().item()
            torch.testing.assert_close(
                parameter.grad, others[name].grad, rtol=0, atol=1e-4 * max(scale, 1e-3), msg=name
            )


@families
def test_what_is_sampled_has_transformers_probabilities(family: str) -> None:
    model = make_seeing(family)
    engine = TransformersEngine(model, make_tokenizer(), 200)
    assert engine.shares_cache == (family == "qwen2_5_vl")
    prompts = [_prompt(model.images, random.Random(n), most=2) for n in range(5)]
    requests = [Request(ids, 2, seed=2 * n) for n, ids in enumerate(prompts)]
    found = {n: done for step in engine.generate(requests, Sampling(8, 1.0)) for n, done in step}
    for n, drawn in found.items():
        for completion in drawn:
            expected, _ = _plain(model, prompts[n], completion.ids)
            torch.testing.assert_close(torch.tensor(completion.logprobs), expected, rtol=0, atol=1e-5)
    # Whatever else is in the batch.
    ((_, alone),) = [done for step in engine.generate(requests[3:4], Sampling(8, 1.0)) for done in step]
    assert [it.ids for it in alone] == [it.ids for it in found[3]]
    together = [
        prompt + completion[0].ids for prompt, completion in zip(prompts, (found[n] for n in range(5)), strict=True)
    ]
    for ids, scores in zip(together, engine.compute_logprobs(together), strict=True):
        expected = plain_logits(model, ids).log_softmax(-1)
        for place, (token, score) in enumerate(zip(ids[1:], scores, strict=True)):
            assert token < 0 or abs(expected[place, token].item() - score) < 1e-5


@families
def test_the_kl_to_the_base_is_that_of_plain_passes(family: str) -> None:
    one, other = make_seeing(family), make_seeing(family)
    with torch.no_grad():
        for parameter in one.get_decoder().parameters():
            parameter += 0.05 * torch.randn_like(parameter)
    prompts, completions = _drawn(one.images, 5, g=1)
    for prompt, completion, found in zip(
        prompts, completions, mean_kl(one, other, prompts, completions, [None] * 3), strict=True
    ):
        log_p, log_q = (
            plain_logits(it, prompt + completion)[len(prompt) - 1 : -1].log_softmax(-1) for it in (one, other)
        )
        assert found == pytest.approx((log_p.exp() * (log_p - log_q)).sum(-1).mean().item(), abs=1e-5)


def test_an_image_is_encoded_once_for_all_that_show_it(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[list[int]] = []
    encode = module._encode
    monkeypatch.setattr(module, "_encode", lambda model, numbers: asked.append([*numbers]) or encode(model, numbers))
    model = make_seeing("qwen2_5_vl")
    policy = Policy(model, 1.0, max_length=200)
    asked.clear()
    model.images.kept.clear()
    prompts, completions = _drawn(model.images, 1, groups=6)
    seen = {int(n) for ids in prompts for n in model.images.numbers(torch.tensor([t for t in ids if t < 0]).numpy())}
    for _ in range(2):
        policy(policy.prepare(_sequences(prompts, completions)))
    assert sorted(asked) == [[n] for n in sorted(seen)]
    # An image part that is trained is asked in each pass, for each image once.
    trained = make_seeing("qwen2_5_vl", frozen=False)
    policy = Policy(trained, 1.0, max_length=200)
    asked.clear()
    policy(policy.prepare(_sequences(prompts, completions)))
    assert asked == [sorted(seen)]


@families
def test_features_that_are_kept_are_those_of_each_image_alone(family: str) -> None:
    """Bit for bit, whichever were asked for together: a resumed training has kept others."""
    one, other = make_seeing(family), make_seeing(family)
    alone = torch.cat([module._features(one, [n]) for n in (2, 0, 3)])
    assert torch.equal(module._features(other, [2, 0, 3]), alone)


@families
@pytest.mark.parametrize("adapts", [False, True])
def test_a_saved_policy_reads_the_same_images(family: str, adapts: bool, tmp_path: Path) -> None:
    make_seeing(family).save_pretrained(tmp_path / "base")
    images = make_seeing(family).images
    config = ModelConfig(name_or_path=str(tmp_path / "base"), use_peft=adapts, **({"lora_r": 2} if adapts else {}))
    model = with_adapter(load_model(tmp_path / "base", images=images), config)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.requires_grad:
                assert "language_model" in name or "lm_head" in name
                parameter += 0.05 * torch.randn_like(parameter)
    save_model(model, make_tokenizer(), tmp_path / "model", config)
    again = load_model(tmp_path / "model", images=images)
    prompts, completions = _drawn(images, 2, g=1)
    rows = _sequences(prompts, completions)
    policies = [Policy(it, 1.0, max_length=200) for it in (model, again)]
    found, expected = (policy(policy.prepare(rows))[0] for policy in policies)
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-5)


def test_a_text_model_is_refused_for_images(tmp_path: Path) -> None:
    images = make_seeing("gemma3").images
    with pytest.raises(ConfigError, match="the prompts have images, and transformers has no class"):
        load_model(make_model(tmp_path), images=images)
