"""Training on conversations: the gradient is that of plain passes over the tokens that the policy sampled."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from accelerate.state import AcceleratorState

from grpo_core.config.files import dump_config, parse_config
from grpo_core.environments.processes import Environments
from grpo_core.planning.plan import make_plan, plan_inputs
from grpo_core.rollout.collect import Sample
from grpo_core.rollout.transformers_engine import TransformersEngine
from grpo_core.training import session as sessions
from grpo_core.training.roll_out import compute_logprobs, roll_out
from grpo_core.training.session import Session, load_session
from tests.conftest import with_keys
from tests.grpo_core.environments.scripted import Scripted, call, turns
from tests.grpo_core.environments.talking import COUNTING, share_environments
from tests.grpo_core.model.exactness import (
    START,
    distance,
    first_update,
    gradient_and_metrics,
    plain_gradient,
    rollout_with,
    updating_gradient,
)

pytestmark = pytest.mark.served

BOUND = 1e-5  # relative: float32's rounding over sequences of hundreds of tokens
PROMPTS, GROUP = 4, 4
ADVANTAGES = torch.randn(PROMPTS * GROUP, generator=torch.Generator().manual_seed(0))
SCRIPTS = [  # by prompt: the members of a group say the same, and are told apart by what is added below
    ["straight"],
    [call("add", '{"number": 5}'), "then this"],
    [call("later"), call("number"), "longer than the others"],
    [call("fail"), "x"],
]


@pytest.fixture
def session(
    request: pytest.FixtureRequest,
    folder: Path,
    counting: Environments,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> Iterator[Session]:
    """Ready to train on conversations that are scripted, with the model's own log-probabilities."""
    values = {
        "name": "talks",
        "model": {"name_or_path": str(folder)},
        "data": {"train": "train.parquet", "eval": "eval.parquet"},
        "rewards": [{"function": "environment"}],
        "environment": {"environment_factory": COUNTING},
        "rollout": {"engine": "transformers", "num_generations": GROUP, "max_completion_length": 700},
        "train": {"per_device_train_batch_size": PROMPTS * GROUP, "max_steps": 2, "max_grad_norm": 1e9},
    }
    config = parse_config(with_keys(values, **getattr(request, "param", {})))
    run = tmp_path / "run"
    (run / "dataset").mkdir(parents=True)
    rows = [
        {"prompt": [{"role": "user", "content": f"#{place}"}], "answer": "1", "unseeded": place == PROMPTS - 1}
        for place in range(PROMPTS)
    ]
    pq.write_table(pa.Table.from_pylist(rows), run / "dataset" / "train.parquet")
    (run / "config.toml").write_text(dump_config(config))
    (run / "plan.json").write_text(json.dumps({"plan": asdict(make_plan(plan_inputs(config, PROMPTS)))}))

    def make_engine(config: Any, path: Any, model: Any, tokenizer: Any, max_length: int) -> Any:
        real = TransformersEngine(model, tokenizer, max_length)
        format = turns(tokenizer)
        real.generate = Scripted(SCRIPTS, format, lambda ids: real.compute_logprobs([ids])[0]).generate  # type: ignore
        return real

    monkeypatch.setattr(sessions, "make_engine", make_engine)
    share_environments(monkeypatch, counting)
    yield load_session(run)
    AcceleratorState._reset_state(reset_partial_state=True)


def test_each_token_that_was_sampled_is_trained_and_no_other(session: Session) -> None:
    rollout, samples, _ = roll_out(session, 0, START)
    written = [session.scoring.tokenizer.decode(_sampled_ids(sample)) for sample in samples]
    assert written == ["".join(f"{text}<|im_end|>" for text in SCRIPTS[sample.row]) for sample in samples]
    batch = first_update(session, rollout)
    assert batch.mask.sum() == sum(len(_sampled_ids(sample)) for sample in samples)


def test_the_trainer_finds_the_log_probabilities_of_what_was_sampled(session: Session) -> None:
    """On-policy, and with the same weights: tokens that stand elsewhere, or that were tokenized again, would differ."""
    rollout = rollout_with(session, ADVANTAGES)
    _, metrics = gradient_and_metrics(session, first_update(session, rollout))
    assert metrics["sampling/sampling_logp_difference/max"] < 1e-5


def test_members_of_a_group_that_began_differently_are_trained_on_their_own_prompts(session: Session) -> None:
    """As with a remote environment that ignores the seed; the whole rollout, so that its prompts meet in one pass."""
    assert session.policy.packs
    rollout = rollout_with(session, ADVANTAGES)
    assert len({tuple(ids) for ids in rollout.prompt_ids}) > PROMPTS
    found, _ = compute_logprobs(session, session.policy, rollout, torch.ones(PROMPTS * GROUP, dtype=torch.bool))
    difference = (found - rollout.sampling_logprobs) * rollout.completion_mask
    assert difference.abs().max() < 1e-5
    batch = first_update(session, rollout)
    assert distance(updating_gradient(session, batch), plain_gradient(session, batch)) < BOUND


def test_what_the_environment_says_reaches_no_gradient_except_as_context(session: Session) -> None:
    """Whatever stands there as the log-probability of a token that nobody sampled."""
    rollout = rollout_with(session, ADVANTAGES)
    said = rollout.completion_mask == 0
    batch = first_update(session, replace(rollout, sampling_logprobs=rollout.sampling_logprobs.masked_fill(said, -9.0)))
    plain = first_update(session, rollout)
    assert distance(updating_gradient(session, batch), updating_gradient(session, plain)) == 0.0


def _sampled_ids(sample: Sample) -> list[int]:
    ids, mask = sample.completion.ids, sample.completion.mask
    assert mask is not None
    return [token for token, own in zip(ids, mask, strict=True) if own]
