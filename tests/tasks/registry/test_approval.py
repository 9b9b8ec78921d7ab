"""A person is asked before a version that passes becomes the champion; on a real MLflow database."""

from __future__ import annotations

import re
from typing import Any

import numpy as np
import polars as pl
import pytest
from typer.testing import CliRunner

from flows.cli.main import app
from grpo_core.config.files import parse_config
from tasks.promotion import _question
from tasks.registry.approval import LONGEST, Approval, Change, largest_changes
from tasks.registry.champion import Outcome, is_decided, promote, rollback
from tasks.registry.gate import Contestant
from tests.evaluations import fixed_samples, promotion_config, register_version
from tests.tasks.registry.champions import champion_of, history_of, tags_of

ASKS = promotion_config(approval=True)
YES = Approval(approved=True, by="Ada", words="short and right")
NO = Approval(approved=False, by="Ada")

pytestmark = pytest.mark.usefixtures("mlflow")


def _register(model: str, right: int, of: int = 20, **keys: Any) -> str:
    samples = fixed_samples({"base": [0] * of, "trained": [1] * right + [0] * (of - right)})
    return register_version(model, samples, config=ASKS, **keys)


@pytest.mark.slow
def test_a_version_that_passes_waits_and_asking_again_is_no_further_attempt(model: str) -> None:
    _register(model, 15)
    first, again = promote(model), promote(model)
    assert (first.decision, first.reason, first.changes) == ("waiting", again.reason, again.changes)
    assert "(attempt 1 against the base model" in again.reason
    assert (champion_of(model), is_decided(model, "1")) == (None, False)
    outcome = promote(model, approval=YES)
    assert (outcome.decision, outcome.reason) == ("promoted", first.reason)
    assert (champion_of(model), history_of(model)) == ("1", [("1", "promoted")])
    tags = tags_of(model, "1")
    assert (tags["decision"], tags["by"], tags["words"]) == ("promoted", "Ada", "short and right")
    assert is_decided(model, "1")


def test_no_is_kept_with_its_name_and_may_be_followed_by_yes(model: str) -> None:
    _register(model, 15)
    assert promote(model, approval=NO).decision == "rejected"
    tags = tags_of(model, "1")
    assert (tags["decision"], tags["by"], "words" in tags) == ("rejected", "Ada", False)
    assert (champion_of(model), is_decided(model, "1")) == (None, True)
    assert promote(model, approval=YES).decision == "promoted"


def test_yes_promotes_nothing_that_the_gate_refuses_and_force_asks_nobody(model: str) -> None:
    _register(model, 1)
    assert promote(model).decision == "refused"
    assert promote(model, approval=YES).decision == "refused"
    assert champion_of(model) is None
    assert promote(model, force=True).decision == "forced"


@pytest.mark.slow
def test_an_answer_holds_against_the_champion_of_its_time(model: str) -> None:
    """While a version waits, another becomes champion that it does not beat."""
    first, second = _register(model, 15), _register(model, 16)
    assert promote(model, first).decision == "waiting"
    assert promote(model, second, approval=YES).decision == "promoted"
    outcome = promote(model, first, approval=YES)
    assert (outcome.decision, outcome.against, champion_of(model)) == ("refused", second, second)
    assert "by" in tags_of(model, first)


@pytest.mark.slow
def test_an_answer_to_an_earlier_question_is_gone_when_it_is_asked_again(model: str) -> None:
    _register(model, 8)
    _register(model, 20)
    assert promote(model, "1", approval=YES).decision == "promoted"
    assert promote(model, "2", approval=YES).decision == "promoted"
    assert rollback(model) == ("2", "1")
    assert promote(model, "2").decision == "waiting"
    assert "by" not in tags_of(model, "2")


def test_the_command_answers_for_a_person(model: str) -> None:
    _register(model, 15)

    def grpo(*arguments: str) -> tuple[int, str]:
        result = CliRunner().invoke(app, ["promote", model, *arguments])
        return result.exit_code, " ".join(result.output.split())

    code, said = grpo()
    assert code == 1 and f"{model} version 1: waiting: accuracy" in said
    assert f"`grpo promote {model} --version 1 --approve NAME`, or --reject NAME, answers" in said
    for arguments, message in [
        (("--approve", "Ada", "--reject", "Bob"), "give one of them"),
        (("--words", "fine"), "they go with --approve NAME or --reject NAME"),
        (("--approve", ""), "at least 1 character"),
        (("--approve", "A" * 101), "at most 100 characters"),
    ]:
        code, said = grpo(*arguments)
        assert code == 2 and message in said
    code, said = grpo("--reject", "Bob", "--words", "too long")
    assert code == 1 and f"{model} version 1: rejected: " in said
    code, said = grpo("--approve", "Ada")
    assert code == 0 and f"{model} version 1: promoted: " in said
    assert (tags_of(model, "1")["by"], "words" in tags_of(model, "1")) == ("Ada", False)


@pytest.mark.parametrize("seed", range(5))
def test_a_person_sees_what_changed_most_with_what_was_said(seed: int) -> None:
    """Held against sorting by hand; rows in any order, several samples, some unscored, prompts as messages."""
    rng = np.random.default_rng(seed)
    rows, samples = 12, int(rng.integers(1, 4))
    score = {policy: rng.choice([0.0, 0.5, 1.0, np.nan], (rows, samples)) for policy in ("base", "trained")}
    frame = pl.DataFrame(
        [
            {
                "set": "held-out",
                "row": row,
                "sample": sample,
                "prompt": [{"role": "user", "content": f"prompt {row}"}],
                **{
                    f"{policy}/rewards/r": None if np.isnan(it[row, sample]) else it[row, sample]
                    for policy, it in score.items()
                },
                **{f"{policy}/completion": f"{policy} {row} {sample} " + "x" * 600 for policy in score},
            }
            for row in range(rows)
            for sample in range(samples)
        ],
        infer_schema_length=None,
    ).sample(fraction=1.0, shuffle=True, seed=seed)
    values = ASKS.model_dump(exclude_unset=True) | {"rewards": [{"function": "numeric_match", "name": "r"}]}
    config = parse_config(values | {"promotion": {"metric": "reward", "approval": True}})
    mean = {
        policy: [np.mean(row[~np.isnan(row)]) if (row == row).any() else np.nan for row in it]
        for policy, it in score.items()
    }
    gains = {row: mean["trained"][row] - mean["base"][row] for row in range(rows)}
    lost = sorted(gain for gain in gains.values() if gain < 0)[:3]
    won = sorted((gain for gain in gains.values() if gain > 0), reverse=True)[:3]
    found = largest_changes(config, Contestant("it", frame, "trained"), Contestant("base", frame, "base"))
    assert [it.gain for it in found] == lost + won
    for it in found:
        row = int(it.prompt.removeprefix("user: prompt "))
        assert it.gain == gains[row]
        assert it.candidate.startswith(f"trained {row} 0 x") and it.rival.startswith(f"base {row} 0 x")
        assert len(it.candidate) < LONGEST + 40 and re.search(r" … [\d,]+ more characters … x+$", it.candidate)


def test_the_question_is_free_of_tables_which_prefects_dialog_shrinks_to_nothing() -> None:
    changes = (Change("lost <b>", "right", "wrong\n# head", -1.0), Change("won", "wrong", "right", 1.0))
    shown = _question(Outcome("waiting", "sums", "4", "3", "better, p = 0.01", None, changes))
    headings = [line for line in shown.splitlines() if line.startswith("#")]
    assert headings == ["# Make sums version 4 the champion?", "## What it lost most", "## What it won most"]
    assert "\n| " not in shown and "<b>" not in shown
    assert (
        shown.index("lost \\<b")
        < shown.index("**is** wrong⏎")
        < shown.index("What it won")
        < shown.index("**is** right")
    )
