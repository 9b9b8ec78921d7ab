"""Training on conversations that are sampled ahead: turns are by the weights of their time, and the plan holds."""

from __future__ import annotations

import copy
import json
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from accelerate.state import AcceleratorState

from grpo_core.config.files import dump_config, parse_config
from grpo_core.data.order import Schedule
from grpo_core.environments import conversation, processes
from grpo_core.environments.processes import Environments
from grpo_core.environments.setting import Setting
from grpo_core.planning.plan import make_plan, plan_inputs
from grpo_core.rollout import conversations
from grpo_core.rollout.batch_metrics import age_metrics
from grpo_core.rollout.collect import Sample
from grpo_core.rollout.conversations import ConversationsAhead
from grpo_core.rollout.transformers_engine import TransformersEngine
from grpo_core.rollout.types import Completion, Request, Sampling, Stream
from grpo_core.training import loop as trainer
from grpo_core.training import session as sessions
from grpo_core.training.health import not_finite
from tests.conftest import with_keys
from tests.grpo_core.environments.scripted import Scripted, call, turns
from tests.grpo_core.environments.talking import COUNTING, share_environments

PROMPTS, GROUP, STALENESS = 12, 2, 4
ADD = call("add", '{"number": 5}')
SCRIPTS = [[*[ADD] * (0, 0, 1, 4)[place % 4], f"end {place}"] for place in range(PROMPTS)]


class Turns:
    """The turns of conversations, as scripted, with the log-probabilities of the weights of now; one per step."""

    def __init__(self, model: Any, tokenizer: Any, max_length: int):
        self.real = TransformersEngine(model, tokenizer, max_length)
        self.script = Scripted(SCRIPTS, turns(tokenizer), lambda ids: self.real.compute_logprobs([ids])[0])
        self.generate, self.compute_logprobs = self.script.generate, self.real.compute_logprobs
        self.close, self.notes = self.real.close, self.real.notes
        self.version, self.weights = 0, dict[int, dict[str, torch.Tensor]]()

    def sync_weights(self, model: Any) -> str:
        self.version += 1
        self.weights[self.version] = copy.deepcopy(model.state_dict())
        return self.real.sync_weights(model)

    def generate_ahead(self, requests: Sequence[Request], sampling: Sampling) -> Stream:
        waiting, count = [*enumerate(requests)], len(requests)
        while waiting:
            number, request = waiting.pop(0)
            ((_, (found,)),) = next(self.script.generate([request], sampling))
            more = (yield [(number, [replace(found, versions=[self.version] * len(found.ids))])]) or ()
            waiting += enumerate(more, count)
            count += len(more)


@pytest.mark.slow
@pytest.mark.parametrize("rolls_back", [False, pytest.param(True, marks=pytest.mark.e2e)])
def test_conversations_go_on_with_new_weights_and_each_prompt_is_trained_as_planned(
    folder: Path, counting: Environments, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, rolls_back: bool
) -> None:
    values = {
        "name": "talks",
        "model": {"name_or_path": str(folder)},
        "data": {"train": "train.parquet", "eval": "eval.parquet"},
        "rewards": [
            {"function": "environment"},
            {"function": "tests.grpo_core.environments.test_training_ahead:varied"},
        ],
        "environment": {"environment_factory": COUNTING},
    }
    keys = {"engine": "vllm-server", "max_staleness": STALENESS, "num_generations": GROUP, "max_steps": 6}
    keys |= {"max_completion_length": 700, "per_device_train_batch_size": 4 * GROUP, "learning_rate": 1e-3}
    keys |= {"save_steps": 1, "not_finite_action": "roll_back"}
    config = parse_config(with_keys(values, **keys))
    plan, run, made = make_plan(plan_inputs(config, PROMPTS)), tmp_path / "run", list[Turns]()
    (run / "dataset").mkdir(parents=True)
    rows = [{"prompt": [{"role": "user", "content": f"#{place}"}], "answer": "1"} for place in range(PROMPTS)]
    pq.write_table(pa.Table.from_pylist(rows), run / "dataset" / "train.parquet")
    (run / "config.toml").write_text(dump_config(config))
    (run / "plan.json").write_text(json.dumps({"plan": asdict(plan)}))

    def make_engine(config: Any, path: Any, model: Any, tokenizer: Any, max_length: int) -> Any:
        made.append(Turns(model, tokenizer, max_length))
        return made[0]

    taken: dict[int, tuple[int, list[Sample]]] = {}
    held: list[int] = []  # conversations, after each generation batch
    roll_out, check_health = trainer.roll_out, trainer.check_health

    def recorded(session: Any, index: int, state: Any) -> Any:
        found = roll_out(session, index, state)
        taken[index] = made[0].version, found[1]
        held.append(len(session.scoring.setting.environments.taken))
        return found

    def broken_once(session: Any, state: Any) -> Any:
        state, metrics, findings = check_health(session, state)
        if rolls_back and state.updates == 4 and not state.roll_backs:
            findings = [not_finite(config.health, 4, ValueError("broken"))]
        return state, metrics, findings

    monkeypatch.setattr(sessions, "make_engine", make_engine)
    monkeypatch.setattr(trainer, "roll_out", recorded)
    monkeypatch.setattr(trainer, "check_health", broken_once)
    share_environments(monkeypatch, counting)
    try:
        result = trainer.train(run, run / "training")
    finally:
        AcceleratorState._reset_state(reset_partial_state=True)
    assert result["counted"] == result["planned"]
    assert result["roll_backs"] == rolls_back
    trained = Counter((sample.turn, sample.row) for _, samples in taken.values() for sample in samples)
    scheduled = [(i, row) for i in range(plan.rollouts) for row in Schedule(plan, config.seed).prompts(i)]
    assert trained == dict.fromkeys(scheduled, GROUP)
    oldest, mixed = 0, 0
    model, tokenizer = copy.deepcopy(made[0].real.model), made[0].script.format.tokenizer
    for version, samples in taken.values():
        for sample in samples:
            said = sample.completion
            assert said.mask is not None and said.ages is not None
            own = [place for place, sampled in enumerate(said.mask) if sampled]
            assert tokenizer.decode([said.ids[place] for place in own]) == "".join(
                f"{text}<|im_end|>" for text in SCRIPTS[sample.row]
            )
            assert said.ages == sorted(said.ages, reverse=True)
            oldest, mixed = max(oldest, said.ages[0]), mixed + (len(set(said.ages)) > 1)
            for age in set(said.ages):
                model.load_state_dict(made[0].weights[version - age])
                found = TransformersEngine(model, tokenizer, 2000).compute_logprobs([sample.prompt_ids + said.ids])[0]
                plain = found[len(sample.prompt_ids) - 1 :]
                for place in own:
                    if said.ages[place] == age:
                        assert said.logprobs[place] == pytest.approx(plain[place], abs=1e-4)
    assert 1 < oldest <= STALENESS
    assert mixed, "a conversation has turns by several weights"
    assert max(held) <= 2 * 4 * GROUP
    assert held[-1] == 0


def test_staleness_is_that_of_the_tokens_that_the_policy_sampled() -> None:
    talk = Completion([1] * 4, [0.0] * 4, truncated=False, mask=[1, 0, 0, 1], ages=[3, 9, 9, 1])
    single = Completion([1, 1], [0.0] * 2, truncated=False, ages=[2, 2])
    assert age_metrics([talk, single]) == {"sampling/staleness/mean": 2.0, "sampling/staleness/max": 3.0}
    assert age_metrics([replace(talk, ages=None)]) == {}


def varied(completion_ids: list[list[int]], **_: Any) -> list[float]:
    """Told apart within a group, so that there is something to learn."""
    return [float(place % 2) for place, _ in enumerate(completion_ids)]


def test_the_time_in_which_nothing_looks_for_answers_is_not_the_tools(
    counting: Environments, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Hours between two batches: the conversations' questions and their deadlines are as if there were none."""
    hours = [0.0]
    clock = SimpleNamespace(monotonic=lambda: time.monotonic() + hours[0])
    for module in (processes, conversation, conversations):
        monkeypatch.setattr(module, "time", clock)
    format = turns()
    engine: Any = SimpleNamespace(version=1, generate_ahead=Scripted(SCRIPTS, format).generate)
    rows = [{"prompt": [{"role": "user", "content": f"#{place}"}], "answer": "1"} for place in range(PROMPTS)]
    ahead = ConversationsAhead(engine, Setting(counting, format), SimpleNamespace(rows=rows))  # type: ignore[arg-type]
    requests, sampling = [Request([3], 1, 100 + row, row=row) for row in range(4)], Sampling(700)
    ahead.begin(requests, sampling, 2)
    hours[0] += 36_000.0
    engine.version = 2
    found = [talk for step in ahead.take(requests, sampling, 4) for _, (talk,) in step]
    assert len(found) == 4
    assert [talk.said.failure for talk in found] == [""] * 4
    assert max(talk.said.seconds for talk in found) < 3_600
    counting.free([talk.environment for talk in found])
    ahead.begin([Request([3], 1, 200, row=3)], sampling, 2)
    ahead.drop_begun()
    assert not counting.taken
