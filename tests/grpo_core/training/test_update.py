"""The parts of an update that no run as a whole shows: gradients over processes, weight decay, counts, patience."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
import transformers
from hypothesis import given
from hypothesis import strategies as st
from torch.nn import Parameter
from transformers import AutoModelForCausalLM, EarlyStoppingCallback, Trainer, TrainerControl, TrainerState

from grpo_core import distributed
from grpo_core.config.algorithm import AlgorithmConfig
from grpo_core.config.training import TrainConfig
from grpo_core.training import loop, update
from grpo_core.training.checkpoint import Checkpoints
from grpo_core.training.optimizer import make_optimizer
from grpo_core.training.state import TrainingState
from tests.grpo_core.training.several import in_two_processes


def test_two_processes_step_with_the_mean_gradient_and_leave_alone_what_neither_trains(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With one process, a parameter without a gradient neither decays nor moves by its momentum."""
    monkeypatch.setattr(distributed, "LARGE", 5)  # elements: messages of one gradient, and one of several

    def start(rank: int) -> None:
        shared, of_one, big, unused = (Parameter(torch.ones(*shape)) for shape in ((2, 2), (1,), (3, 3), (4,)))
        shared.grad = torch.full((2, 2), float(rank))
        big.grad = torch.arange(9.0).view(3, 3) * (1 + 2 * rank)
        if rank == 1:
            of_one.grad = torch.tensor([3.0])
        distributed.average_gradients([shared, unused, of_one, big])
        assert unused.grad is None
        assert shared.grad.tolist() == [[0.5, 0.5]] * 2
        assert of_one.grad is not None
        assert of_one.grad.tolist() == [1.5]
        assert big.grad.equal(torch.arange(9.0).view(3, 3) * 2)

    in_two_processes(tmp_path, start)


SMALL = {"vocab_size": 16, "hidden_size": 8, "num_hidden_layers": 1, "num_attention_heads": 2, "pad_token_id": 0}
MODELS: dict[str, dict[str, Any]] = {
    "GptOss": {**SMALL, "intermediate_size": 8, "num_key_value_heads": 1, "head_dim": 4, "num_local_experts": 2},
    "Cohere": {**SMALL, "intermediate_size": 8, "use_qk_norm": True},
    "GPT2": {"vocab_size": 16, "n_embd": 8, "n_layer": 1, "n_head": 2},
    "Qwen3": {**SMALL, "intermediate_size": 8, "num_key_value_heads": 1, "head_dim": 4},
}


@pytest.mark.parametrize("name", MODELS)
def test_weight_decay_is_on_the_matrices_that_the_trainer_of_transformers_decays(name: str) -> None:
    model = AutoModelForCausalLM.from_config(getattr(transformers, f"{name}Config")(**MODELS[name]))
    optimizer = make_optimizer(model, TrainConfig(weight_decay=0.1, max_steps=1))
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    decays = {names[id(p)]: group["weight_decay"] for group in optimizer.param_groups for p in group["params"]}
    assert decays.keys() == {*names.values()}
    of_trainer = Trainer.get_decay_parameter_names(None, model)
    expected = {name for name, p in model.named_parameters() if name in of_trainer and p.ndim > 1}
    assert {name for name, decay in decays.items() if decay == 0.1} == expected
    assert {decays[name] for name in decays.keys() - expected} <= {0.0}
    assert 0 < len(expected) < len(decays)


@given(
    values=st.lists(st.integers(-8, 8), min_size=1, max_size=12),
    threshold=st.sampled_from([0.0, 0.25, 0.5, 1.0]),
    patience=st.integers(1, 4),
)
def test_patience_ends_when_that_of_transformers_ends_and_the_best_step_is_the_first_of_the_highest(
    values: list[int], threshold: float, patience: int
) -> None:
    callback = EarlyStoppingCallback(patience, threshold)
    arguments = SimpleNamespace(metric_for_best_model="eval_reward", greater_is_better=True)
    state, control = TrainerState(), TrainerControl()
    progress = TrainingState(tokens_per_pass=1)
    figures = [value / 4 for value in values]
    for step, value in enumerate(figures, 1):
        callback.on_evaluate(arguments, state, control, {"eval_reward": value})
        state.best_metric = max(figures[:step])
        progress = progress.with_update(1.0, 1).with_evaluation({}, value, threshold, patience)
        assert progress.stopped_early == control.should_training_stop
        assert progress.best_value == max(figures[:step])
        assert progress.best_step == 1 + figures.index(max(figures[:step]))
        if progress.stopped_early:
            return
    assert (
        not TrainingState(tokens_per_pass=1, evaluations_without_gain=99)
        .with_evaluation({}, -1.0, 0.0, None)
        .stopped_early
    )


@pytest.mark.parametrize(
    ("threshold", "evaluated"),
    [(0.0, [2, 4, 5]), (0.25, [2, 4, 5]), (0.5, [2, 4])],
)
def test_a_training_is_evaluated_after_its_last_update_or_until_it_gains_less_than_the_threshold(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, threshold: float, evaluated: list[int]
) -> None:
    """Each evaluation is 0.375 better than the one before."""
    train = TrainConfig(eval_steps=2, max_steps=5, early_stopping_patience=1, early_stopping_threshold=threshold)
    session: Any = SimpleNamespace(
        config=SimpleNamespace(train=train),
        plan=SimpleNamespace(max_steps=5),
        accelerator=SimpleNamespace(num_processes=1),
    )
    steps: list[int] = []

    def evaluate(session: Any, state: TrainingState, folder: Path) -> dict[str, float]:
        steps.append(state.updates)
        return {"eval_reward": 0.375 * len(steps)}

    monkeypatch.setattr(loop, "evaluate_policy", evaluate)
    monkeypatch.setattr(loop, "keep_best", lambda *_: None)
    state, checkpoints = TrainingState(tokens_per_pass=1), cast("Checkpoints", None)
    while not state.is_done(session.plan):
        state = loop.evaluate_if_due(session, state.with_update(1.0, 1), tmp_path, checkpoints)
        state = replace(state, unrecorded=None)
    assert steps == evaluated


def test_an_adaptive_bonus_is_raised_at_or_below_its_target_and_lowered_above_within_its_bounds() -> None:
    keys = {"entropy_coef_min": 0.0625, "entropy_coef_max": 0.5, "entropy_coef_delta": 0.125, "entropy_target": 1.0}
    config, progress = (
        AlgorithmConfig(use_adaptive_entropy=True, **keys),
        TrainingState(tokens_per_pass=1, entropy_coef=0.25),
    )
    assert update.applied_entropy_coef(config, progress) == 0, "no entropy is known yet"
    for entropy, coef in [(0.5, 0.375), (1.0, 0.5), (0.9, 0.5), (1.1, 0.375), (3, 0.25), (3, 0.125), (3, 0.0625)]:
        progress = update.adapt_entropy(config, progress, entropy)
        assert progress.entropy_coef == coef
        assert update.applied_entropy_coef(config, progress) == (coef if entropy <= 1.0 else 0)
