"""Compiled decoder layers compute what the others do, over many lengths with few compilations."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._dynamo.utils import counters

from grpo_core.config.files import parse_config
from grpo_core.config.inputs import ModelConfig
from grpo_core.fingerprint import determining
from grpo_core.model import compilation
from grpo_core.model.loading import load_model, with_adapter
from grpo_core.model.policy import Policy
from grpo_core.model.sequences import Sequences
from tests.conftest import config_values
from tests.grpo_core.model.exactness import distance

LORA = {"use_peft": True, "bf16": True, "gradient_checkpointing": True}
OPTIONS = [
    # Backend, options of the policy, and the relative difference allowed. Users get inductor, which takes minutes here.
    pytest.param("aot_eager", {"gradient_checkpointing": True}, 2e-6, id="recomputed", marks=pytest.mark.e2e),
    pytest.param("aot_eager", LORA, 0.03, id="LoRA in bfloat16", marks=pytest.mark.e2e),
    pytest.param("inductor", {}, 2e-6, id="inductor", marks=pytest.mark.e2e),
]


@pytest.fixture(autouse=True)
def fresh() -> Iterator[None]:
    torch._dynamo.reset()
    counters.clear()
    yield
    torch._dynamo.reset()


def _policy(folder: Path, *, use_peft: bool = False, **options: Any) -> Policy:
    torch.manual_seed(0)
    model = with_adapter(load_model(folder), ModelConfig(name_or_path=str(folder), use_peft=use_peft, lora_r=4))
    for name, parameter in model.named_parameters():
        if "lora_B" in name:  # zeros: nothing behind them would have a gradient
            torch.nn.init.normal_(parameter, std=0.05)
    return Policy(model, 1.0, **options)


def _sequences(prompts: int, group: int) -> Sequences:
    lengths = torch.randint(2, 8, (prompts,)).repeat_interleave(group)
    completions = torch.randint(2, 24, (prompts * group,))
    ids = torch.randint(3, 12, (prompts * group, int((lengths + completions).max())))
    return Sequences(ids, lengths, completions, torch.arange(prompts * group) // group)


def _computed(policy: Policy, sequences: Sequences) -> tuple[Tensor, list[Tensor]]:
    """Log-probabilities, and the gradient of their sum."""
    policy.zero_grad()
    logprobs, _ = policy(policy.prepare(sequences))
    logprobs.sum().backward()
    return logprobs.detach(), [p.grad.clone() for p in policy.master.parameters() if p.grad is not None]


@pytest.mark.slow
@pytest.mark.parametrize(("backend", "options", "bound"), OPTIONS)
def test_compiled_layers_compute_what_the_others_do(
    smooth_model_folder: Path, monkeypatch: pytest.MonkeyPatch, backend: str, options: dict[str, Any], bound: float
) -> None:
    plain = _policy(smooth_model_folder, **options)
    monkeypatch.setattr(compilation.torch, "compile", partial(torch.compile, backend=backend))
    compiled = _policy(smooth_model_folder, torch_compile=True, **options)
    assert [*compiled.model.state_dict()] == [*plain.model.state_dict()]
    assert [name for name, _ in compiled.named_parameters()] == [name for name, _ in plain.named_parameters()]
    for shape in ((3, 4), (5, 2), (2, 6), (7, 3), (4, 4), (6, 2), (2, 2)):
        sequences = _sequences(*shape)
        for found, expected in zip(_computed(compiled, sequences), _computed(plain, sequences), strict=True):
            assert distance([*found], [*expected]) < bound
        with torch.no_grad():
            assert distance(*([p(p.prepare(sequences))[0]] for p in (compiled, plain))) < bound
    assert 0 < counters["stats"]["unique_graphs"] <= 3  # with gradients, without, and once more where lengths are equal
    assert not counters["graph_break"]


@pytest.mark.slow
def test_sampling_with_a_cache_is_not_compiled(smooth_model_folder: Path) -> None:
    compiled, ids = _policy(smooth_model_folder, torch_compile=True), torch.tensor([[3, 4, 5]])
    found = compiled.model.generate(ids, max_new_tokens=5, do_sample=False)
    assert found.tolist() == load_model(smooth_model_folder).generate(ids, max_new_tokens=5, do_sample=False).tolist()
    assert not counters["stats"]


def test_a_training_may_be_continued_with_compiled_layers() -> None:
    values = config_values(Path("model"), Path("data"))
    compiled = config_values(Path("model"), Path("data"), torch_compile=True)
    assert determining(parse_config(compiled)) == determining(parse_config(values))
