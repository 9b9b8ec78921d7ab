"""A warm start is a plain loop of supervised training in float64, and the run's training begins from its model."""

from __future__ import annotations

import json
import math
import random
import shutil
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from accelerate.state import AcceleratorState

from grpo_core.config.files import load_config
from grpo_core.data.demonstrations import SCHEMA
from grpo_core.data.order import epoch_rows
from grpo_core.evaluation.probe import probe
from grpo_core.model.loading import load_model
from grpo_core.planning.plan import load_plan
from grpo_core.rollout import collect
from grpo_core.rollout.collect import Sample, sample_and_score
from grpo_core.training.checkpoint import fingerprint
from grpo_core.training.loop import train
from tests.conftest import config_values, make_model, make_run, make_tokenizer, with_keys
from tests.grpo_core.training.plain_training import _weights, assert_plain, load, load_policy
from tests.grpo_core.training.several import in_processes
from tests.grpo_core.training.test_plain import CALM, LORA, passes
from tests.grpo_core.training.training import demonstrate, figures_of, plan_demonstrations, weights_of

KINDS: dict[str, dict[str, Any]] = {"plain": {}, "tied": {"tie_word_embeddings": True}, "adapter": {}}


def _drawn(folder: Path, draw: random.Random, kind: str, **keys: Any) -> tuple[Path, list[dict[str, Any]]]:
    """A run with drawn options, and its demonstrations."""
    options = {
        "per_device_train_batch_size": draw.choice([2, 4, 8]),
        "max_grad_norm": draw.choice([1e9, 0.05]),
        "temperature": draw.choice([0.5, 1.0]),  # which a warm start has nothing to do with
        "gradient_checkpointing": draw.random() < 0.3,
        "beta": 0.1,
        **CALM,
        **(LORA if kind == "adapter" else {}),
        **keys,
    }
    model = make_model(folder / "model", initializer_range=0.03, **KINDS[kind])
    values = with_keys(config_values(model, folder), **options)
    epochs = draw.choice([{"num_train_epochs": 2.5}, {"max_steps": 5}])
    values["warm_start"] = {"demonstrations": "x", "batch_size": draw.choice([4, 6]), "learning_rate": 1e-3, **epochs}
    run = make_run(folder / "run", values)
    return run, demonstrate(run, draw)


def _plain_training(run: Path, rows: list[dict[str, Any]]) -> tuple[list[tuple[float, float]], Any]:
    """Loss and gradient norm of each update, and the trained model, by a loop over demonstrations one by one."""
    config, plan = load_config(run / "config.toml"), load_plan(run / "warm-start" / "plan.json")
    keys, size, model = config.train, config.warm_start.batch_size, load_policy(config)
    parameters = [p for p in model.parameters() if p.requires_grad]
    groups = [{"params": [p for p in parameters if (p.ndim > 1) == decays]} for decays in (True, False)]
    groups[0]["weight_decay"], groups[1]["weight_decay"] = keys.weight_decay, 0.0
    optimizer = torch.optim.AdamW([g for g in groups if g["params"]], betas=(0.9, keys.adam_beta2), eps=1e-3)
    per_epoch, steps = len(rows) // size, list[tuple[float, float]]()
    asked = config.warm_start.max_steps or math.ceil(config.warm_start.num_train_epochs * per_epoch)
    for step in range(asked):
        epoch, place = divmod(step, per_epoch)
        chosen = [rows[row] for row in epoch_rows(plan, config.seed, epoch)[place * size : (place + 1) * size]]
        said = list[torch.Tensor]()
        for row in chosen:
            prompt, ids = row["prompt_ids"], row["completion_ids"]
            logits = model(input_ids=torch.tensor([prompt + ids])).logits[0, len(prompt) - 1 : -1]
            logprobs = logits.log_softmax(-1)[range(len(ids)), ids]
            said += [logprob for logprob, trained in zip(logprobs, row["trained_tokens"], strict=True) if trained]
        loss = -torch.stack(said).mean()
        optimizer.zero_grad()
        loss.backward()
        norm = math.sqrt(sum(float(p.grad.square().sum()) for p in parameters if p.grad is not None))
        steps.append((loss.item(), norm))
        for p in parameters:
            p.grad = torch.zeros_like(p) if p.grad is None else p.grad * min(1.0, keys.max_grad_norm / norm)
        for group in optimizer.param_groups:
            group["lr"] = config.warm_start.learning_rate * (asked - step) / asked
        optimizer.step()
    return steps, model


def _assert_plain(run: Path, rows: list[dict[str, Any]]) -> None:
    before, trained = load_policy(load_config(run / "config.toml")), load(run / "warm-start" / "model")
    steps, after = _plain_training(run, rows)
    lines = [json.loads(line) for line in (run / "warm-start" / "metrics.jsonl").read_text().splitlines()]
    for found, (loss, norm) in zip(lines, steps, strict=True):
        assert found["loss"] == pytest.approx(loss, rel=2e-5)
        assert found["grad_norm"] == pytest.approx(norm, rel=2e-5)
        assert not [name for name in found if name.startswith(("sampling", "clip", "cispo", "log_ratio", "reward"))]
    first, found, expected = (_weights(model) for model in (before, trained, after))
    assert (found - expected).norm() < 2e-5 * (expected - first).norm() + 1e-6


@pytest.mark.slow
@pytest.mark.parametrize("number", [*range(3), *(pytest.param(n, marks=pytest.mark.e2e) for n in range(3, 15))])
def test_a_warm_start_is_a_plain_supervised_loop_and_the_training_begins_from_its_model(
    number: int, tmp_path: Path
) -> None:
    draw, kind = random.Random(number), [*KINDS][number % 3]
    run, rows = _drawn(tmp_path, draw, kind)
    with passes(number, draw):
        train(run, run / "warm-start", warm_start=True)
        AcceleratorState._reset_state(reset_partial_state=True)
        _assert_plain(run, rows)
        train(run, run / "training")
        AcceleratorState._reset_state(reset_partial_state=True)
        assert (run / "training" / "adapter").exists() == (kind == "adapter")

        values = load_config(run / "config.toml").model_dump(mode="json", exclude_defaults=True)
        del values["warm_start"]
        started = {"adapter": str(run / "warm-start" / "adapter")}
        values["model"] |= started if kind == "adapter" else {"name_or_path": str(run / "warm-start" / "model")}
        other = make_run(tmp_path / "other", values)
        train(other, other / "training")
    AcceleratorState._reset_state(reset_partial_state=True)
    assert figures_of(run) == figures_of(other)
    assert figures_of(run)[0]["kl"] == pytest.approx(0, abs=1e-6), "the reference policy is the warm start's"
    mine, others = weights_of(run), weights_of(other)
    assert all(torch.equal(mine[name], others[name]) for name in others)
    base = dict(load_model(load_config(run / "config.toml").model.name_or_path).named_parameters())
    assert any(not torch.equal(mine[name], base[name]) for name in base)


@pytest.mark.slow
@pytest.mark.parametrize("number", [*range(2), *(pytest.param(n, marks=pytest.mark.e2e) for n in range(2, 8))])
def test_a_warm_start_from_the_probe_trains_on_each_right_completion_once_as_it_was_sampled(
    number: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    draw, sampled = random.Random(number), list[Sample]()

    def spied(*arguments: Any) -> tuple[list[Sample], float]:
        found = sample_and_score(*arguments)
        sampled.extend(found[0])
        return found

    monkeypatch.setattr(collect, "sample_and_score", spied)
    model = make_model(tmp_path / "model", initializer_range=0.03)
    values = config_values(model, tmp_path, temperature=draw.choice([0.7, 1.0]), **CALM)
    length = draw.choice([2, 3])  # tokens of a right completion, the end token included
    values["rewards"][1]["args"]["target"] = length
    values["evaluation"] = {"accuracy_reward": "length"}
    values["data"]["curriculum"] = {"probe": draw.choice([24, 32])}
    values["warm_start"] = {"demonstrations": "probe", "batch_size": 2, "learning_rate": 1e-3, "max_steps": 5}
    run = make_run(tmp_path / "run", values, 10)
    (run / "probe").mkdir()
    figures = probe(run, run / "probe")["demonstrations"]
    AcceleratorState._reset_state(reset_partial_state=True)
    right = {
        (sample.row, *sample.completion.ids): {
            "prompt_ids": sample.prompt_ids,
            "completion_ids": sample.completion.ids,
            "trained_tokens": [1] * length,
        }
        for sample in sampled
        if len(sample.completion.ids) == length and sample.completion.ids[-1] == make_tokenizer().eos_token_id
    }
    rows = [*right.values()]
    assert pq.read_table(run / "probe" / "demonstrations.parquet").to_pylist() == rows
    assert (figures["rows"], figures["trained_tokens"]) == (len(rows), length * len(rows))
    assert 5 < len(rows) < len(sampled) / 2
    plan_demonstrations(run, len(rows))
    train(run, run / "warm-start", warm_start=True)
    AcceleratorState._reset_state(reset_partial_state=True)
    _assert_plain(run, rows)
    train(run, run / "training")
    config, plan = load_config(run / "config.toml"), load_plan(run / "plan.json")
    before = fingerprint(run, config, plan)
    pq.write_table(pa.Table.from_pylist(rows[1:], SCHEMA), run / "probe" / "demonstrations.parquet")
    assert fingerprint(run, config, plan) != before


@pytest.mark.served
@pytest.mark.parametrize("sharding", ["none", "full"])
@pytest.mark.parametrize("kind", ["plain", "adapter"])
def test_processes_train_a_warm_start_and_what_follows_as_plain_loops(tmp_path: Path, kind: str, sharding: str) -> None:
    run, rows = _drawn(tmp_path, random.Random(7), kind, num_processes=2, sharding=sharding)

    in_processes(2, tmp_path / "first", lambda _: train(run, run / "warm-start", warm_start=True))
    in_processes(2, tmp_path / "second", lambda _: train(run, run / "training"))
    _assert_plain(run, rows)
    values = load_config(run / "config.toml").model_dump(mode="json", exclude_defaults=True)
    del values["warm_start"]
    started = {"adapter": str(run / "warm-start" / "adapter")}
    values["model"] |= started if kind == "adapter" else {"name_or_path": str(run / "warm-start" / "model")}
    other = make_run(tmp_path / "other", values)
    shutil.copytree(run / "training", other / "training")
    assert_plain(other)
