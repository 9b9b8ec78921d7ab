"""Compiled decoder layers compute what the others do, over many lengths with few compilations."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from accelerate.state import AcceleratorState
from torch import Tensor, nn
from torch._dynamo.utils import counters

from grpo_core.config.files import parse_config
from grpo_core.config.inputs import ModelConfig
from grpo_core.fingerprint import determining
from grpo_core.model import policy as policies
from grpo_core.model.loading import load_model, with_adapter
from grpo_core.model.policy import Policy
from grpo_core.model.sequences import Sequences
from grpo_core.rollout.group_cache import GroupCache
from grpo_core.training.log import TrainingLog
from grpo_core.training.loop import train
from tests.conftest import config_values, make_run
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
    monkeypatch.setattr(policies.torch, "compile", partial(torch.compile, backend=backend))
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


TRAININGS: dict[str, dict[str, Any]] = {
    "reference": {"beta": 0.1, "gradient_checkpointing": True},
    "LoRA": {"use_peft": True, "lora_r": 2, "lora_dropout": 0.2, "beta": 0.1, "mixed_precision": "bf16"},
    "padded": {"num_iterations": 2, "gradient_accumulation_steps": 4},
}


@pytest.mark.slow
@pytest.mark.parametrize(
    "name", ["reference", *(pytest.param(each, marks=pytest.mark.e2e) for each in TRAININGS if each != "reference")]
)
def test_a_training_compiles_nothing_after_its_first_update_and_sampling_nothing_at_all(
    name: str, smooth_model_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: Any
) -> None:
    compiled: list[dict[str, int]] = []  # by the end of each update
    in_sampling: list[int] = []
    step, decode = TrainingLog.step, GroupCache._forward

    def noting_step(*arguments: Any) -> None:
        step(*arguments)
        compiled.append({**counters["frames"], **counters["stats"]})

    def noting_decode(*arguments: Any) -> Tensor:
        before = counters["frames"]["total"]
        logits = decode(*arguments)
        in_sampling.append(counters["frames"]["total"] - before)
        return logits

    monkeypatch.setattr(policies.torch, "compile", partial(torch.compile, backend="eager"))
    monkeypatch.setattr(TrainingLog, "step", noting_step)
    monkeypatch.setattr(GroupCache, "_forward", noting_decode)
    if name == "padded":
        monkeypatch.setattr(policies, "make_packable", lambda *_, **__: (None, "so that rows are padded"))
    keys = {"max_completion_length": 12, "max_steps": 4, "torch_compile": True, **TRAININGS[name]}
    run = make_run(tmp_path / "run", config_values(smooth_model_folder, tmp_path, **keys))
    train(run, run / "training")
    AcceleratorState._reset_state(reset_partial_state=True)
    assert not any(in_sampling) and len(in_sampling) > 20
    assert compiled[0]["unique_graphs"] > 0
    assert compiled == [compiled[0]] * 4
    assert not counters["graph_break"]
    assert "uncompiled" not in capfd.readouterr().out


@pytest.mark.slow
def test_layers_that_would_be_compiled_too_often_run_uncompiled_and_it_is_said(
    smooth_model_folder: Path, monkeypatch: pytest.MonkeyPatch, capfd: Any
) -> None:
    monkeypatch.setattr(policies.torch, "compile", partial(torch.compile, backend="eager"))
    plain, compiled = (_policy(smooth_model_folder, torch_compile=each) for each in (False, True))
    plain.compiles = True  # as far as the padding goes
    sequences = _sequences(3, 2)
    with torch._dynamo.config.patch(recompile_limit=1):
        _computed(compiled, sequences)
        with torch.no_grad():
            compiled(compiled.prepare(sequences))  # without a gradient: once more
    told = capfd.readouterr().out
    assert told.startswith("train.torch_compile: from now on layers run uncompiled: Dynamo recompile limit exceeded")
    assert told.removeprefix("train.torch_compile: from now on ").strip() == compiled.notes[-1]
    found, expected = _computed(compiled, sequences), _computed(plain, sequences)
    assert torch.equal(found[0], expected[0])
    assert not capfd.readouterr().out


class _NamedSilu(nn.Module):
    def __init__(self, name: str):
        super().__init__()
        self.name = name

    def forward(self, x: Tensor) -> Tensor:
        return x if self.name == "the identity" else nn.functional.silu(x)


@pytest.mark.e2e
def test_a_limit_reached_in_the_middle_of_a_pass_leaves_what_is_computed_again_the_same(
    smooth_model_folder: Path, monkeypatch: pytest.MonkeyPatch, capfd: Any
) -> None:
    """Layers whose code differs, of which the first alone is compiled."""
    monkeypatch.setattr(policies.torch, "compile", partial(torch.compile, backend="aot_eager"))
    plain, compiled = (
        _policy(smooth_model_folder, torch_compile=it, gradient_checkpointing=True) for it in (False, True)
    )
    plain.compiles = True  # as far as the padding goes
    for number, layer in enumerate(compiled.recomputable):
        layer.mlp.act_fn = _NamedSilu(f"layer {number}")  # what is compiled holds for one name
    sequences = _sequences(3, 2)
    with torch._dynamo.config.patch(recompile_limit=1):
        found = _computed(compiled, sequences)
    assert compiled.uncompiled and len(compiled.recomputable) > 1
    for ours, theirs in zip(found, _computed(plain, sequences), strict=True):
        assert distance([*ours], [*theirs]) < 1e-5


@pytest.mark.slow
def test_transformers_own_generation_is_not_compiled(smooth_model_folder: Path) -> None:
    compiled, ids = _policy(smooth_model_folder, torch_compile=True), torch.tensor([[3, 4, 5]])
    found = compiled.model.generate(ids, max_new_tokens=5, do_sample=False)
    assert found.tolist() == load_model(smooth_model_folder).generate(ids, max_new_tokens=5, do_sample=False).tolist()
    assert not counters["stats"]


def test_a_training_may_be_continued_with_compiled_layers() -> None:
    values = config_values(Path("model"), Path("data"))
    compiled = config_values(Path("model"), Path("data"), torch_compile=True)
    assert determining(parse_config(compiled)) == determining(parse_config(values))
