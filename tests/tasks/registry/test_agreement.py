"""A version that answers otherwise than in its evaluation is found, whatever went wrong on the way to it."""

from __future__ import annotations

import json
import logging
import shutil
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from mlflow.models import Model
from safetensors.torch import load_file, save_file

from flows.serving.model_check import _steps
from grpo_core.config.files import load_config
from grpo_core.evaluation.run import evaluate
from grpo_core.rollout.loading import read_prompts
from grpo_core.system.tables import read_parquet
from tasks.processes.run import ProcessError, TimeLimitError
from tasks.registry import answers, asking
from tasks.registry.agreement import Agreement, departure, with_reward_change
from tasks.registry.answers import compare_by_mlflow
from tasks.registry.asking import AGREEING, COMPARED, FAILED, TIES, disagreement
from tests.tasks.registry.evaluated import evaluated_run, make_version, reward_change

pytestmark = pytest.mark.slow


def agreement(run: Path, version: Path) -> Agreement:
    config = load_config(run / "config.toml")
    sources = read_prompts(config, {"held-out": run / "dataset" / "eval.parquet"})
    return with_reward_change(*compare_by_mlflow(config, run, version, sources), run)


@pytest.fixture(scope="module", params=[False, True], ids=["texts", "conversations"])
def run(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return evaluated_run(tmp_path_factory.mktemp("evaluated"), conversational=request.param)


def test_a_version_answers_every_prompt_as_in_the_evaluation(run: Path, tmp_path: Path) -> None:
    found = agreement(run, make_version(run, tmp_path / "version"))
    assert (found.compared, found.equal, found.reward_change) == (16, 16, 0.0)
    answers = read_parquet(run / "evaluation" / "samples.parquet")["trained/completion"]
    assert answers.n_unique() > 3


def swap_digits(version: Path) -> None:
    file = version / "model" / "tokenizer.json"
    text = json.loads(file.read_text())
    vocabulary = text["model"]["vocab"]
    vocabulary["1"], vocabulary["2"] = vocabulary["2"], vocabulary["1"]
    file.write_text(json.dumps(text))


def take_base(version: Path) -> None:
    """As with an adapter that was not merged."""
    file = version / "model" / "model.safetensors"
    file.unlink()
    shutil.copy(Path(load_config(version.parents[1] / "config.toml").model.name_or_path) / "model.safetensors", file)


def lose_stop(version: Path) -> None:
    card = yaml.safe_load((version / "MLmodel").read_text())
    card["signature"]["params"] = card["signature"]["params"].replace('["7"]', "[]")
    (version / "MLmodel").write_text(yaml.safe_dump(card))


FAULTS: dict[str, Callable[[Path], Any]] = {
    "a swapped tokenizer": swap_digits,
    "a lost stop text": lose_stop,
    "an adapter that was not merged": take_base,
}


@pytest.mark.parametrize("fault", FAULTS)
def test_a_version_that_something_happened_to_is_found(run: Path, tmp_path: Path, fault: str) -> None:
    version = make_version(run, run / "versions" / fault)
    FAULTS[fault](version)
    found = agreement(run, version)
    assert found.equal + found.ties < found.compared
    assert found.equal + found.ties + len(found.differing) == found.compared == 16
    for each in found.differing:
        equal = [one == other for one, other in zip(each["served"], each["evaluated"], strict=False)]
        assert each["token"] > [*equal, False].index(False)  # a token is a digit, or shows no text
    if not found.ties:
        assert found.reward_change == pytest.approx(reward_change(run, found))


def test_a_lost_template_is_found(tmp_path: Path) -> None:
    run = evaluated_run(tmp_path, conversational=True)
    version = make_version(run, tmp_path / "version")
    card = Model.load(version)
    card.flavors["python_function"]["config"]["template"] = "{}"
    card.save(str(version / "MLmodel"))
    assert agreement(run, version).equal < 16
    file = version / "model" / "tokenizer_config.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), "chat_template": None}))
    with pytest.raises(Exception, match="chat_template"):
        agreement(run, version)


def test_rounding_is_no_disagreement(tmp_path: Path) -> None:
    """Each even token has the same row in the output layer as the odd one after it; in the version, a little less."""
    run = evaluated_run(tmp_path)

    def change(folder: Path, even: Callable[[torch.Tensor], torch.Tensor]) -> None:
        weights = load_file(folder / "model.safetensors")
        weights["lm_head.weight"][:10:2] = even(weights["lm_head.weight"][1:10:2])
        (folder / "model.safetensors").unlink()
        save_file(weights, folder / "model.safetensors", {"format": "pt"})

    change(run / "training" / "model", lambda odd: odd)
    evaluate(run, run / "evaluation")
    version = make_version(run, tmp_path / "version")
    change(version / "model", lambda odd: (1 - 1e-6) * odd)
    found = agreement(run, version)
    assert found.ties > 0
    assert found.equal + found.ties == 16


def test_answers_that_were_not_greedy_are_compared_with_the_policy_s_greedy_ones(tmp_path: Path) -> None:
    run = evaluated_run(tmp_path, evaluation={"temperature": 5.0})
    found = agreement(run, make_version(run, tmp_path / "version"))
    assert (found.compared, found.equal) == (16, 16)


def test_an_answer_is_a_tie_if_its_first_other_token_is_hardly_likelier_than_the_next() -> None:
    assert departure([("4", False), ("42", True)], "42", "43") == (2, True)
    assert departure([("4", True), ("42", False)], "42", "43") == (2, False)
    assert departure([("4", False), ("4", True)], "4", "42") == (2, True)  # it ends where the other goes on
    assert departure([("4", False), ("4", True), ("42", False)], "42", "43") == (3, True)  # half a character before
    assert departure([("4", True), ("4", False)], "4", "42") == (2, False)
    assert departure([], "", "42") == (0, False)
    assert _steps("4", ["4", "7"], [[-0.1, -0.1, -3.0], [-0.1]], 1e-3) == [("4", True), ("4", False)]  # 7: a stop text


def test_a_promotion_needs_the_agreement_that_it_asks_for() -> None:
    tags = {COMPARED: "50", AGREEING: "49", TIES: "3"}
    assert disagreement(tags, 0.98) == ""
    assert "answers 49 of 50 held-out prompts as in the evaluation, and promotion.served_agreement asks for 100%" in (
        disagreement(tags, 1.0)
    )
    assert "it failed: No tokenizer" in disagreement({FAILED: "No tokenizer"}, 0.0)
    assert disagreement({}, 1.0) == ""


@pytest.mark.parametrize(
    ("on_gpu", "memory", "error", "tags"),
    [
        (True, 2**40, None, {}),  # this machine has no GPU that is free
        (False, 0, None, {}),
        (False, 2**40, TimeLimitError("after 300 s"), {}),
        (False, 2**40, ProcessError("killed", restartable=True), {}),
        (False, 2**40, ProcessError("CUDA out of memory", restartable=False), {}),
        (False, 2**40, ProcessError("no tokenizer", restartable=False), {FAILED: "no tokenizer"}),
    ],
)
def test_a_version_is_asked_only_where_it_can_answer_as_it_was_evaluated(
    on_gpu: bool,
    memory: int,
    error: Exception | None,
    tags: dict[str, str],
    run: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def run_process(*arguments: Any, **options: Any) -> None:
        assert error is not None, "it is asked"
        raise error

    monkeypatch.setattr(asking, "run_process", run_process)
    monkeypatch.setattr(asking, "available_memory", lambda: memory)
    version = make_version(run, tmp_path / "version")
    log = logging.getLogger("asking")
    assert asking.ask_version(load_config(run / "config.toml"), run, version, on_gpu, log) == tags


def test_answers_that_were_compared_count_though_a_reward_hangs(
    run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The process of a version whose tokenizer was swapped ends while its answers get rewards."""
    version = make_version(run, tmp_path / "version")
    swap_digits(version)

    def hang(*arguments: Any) -> None:
        raise TimeLimitError("after 300 s")

    def run_process(command: list[str], *arguments: Any, **options: Any) -> None:
        monkeypatch.setattr(sys, "argv", command[1:])
        answers.main()

    monkeypatch.setattr(answers, "with_reward_change", hang)
    monkeypatch.setattr(asking, "run_process", run_process)
    tags = asking.ask_version(load_config(run / "config.toml"), run, version, False, logging.getLogger("asking"))
    assert tags.keys() == {COMPARED, AGREEING, TIES}
    assert "held-out prompts as in the evaluation" in disagreement({name: str(it) for name, it in tags.items()}, 1.0)
