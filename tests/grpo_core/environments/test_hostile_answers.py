"""What a policy hands in reaches other people's verifiers: each kind of reasoning-gym judges hostile answers."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from grpo_core.config.environment import EnvironmentConfig
from grpo_core.environments.conversation import Conversation, conversation_metrics, converse
from grpo_core.environments.processes import Environments
from grpo_core.rollout.conversations import play
from grpo_core.rollout.types import Sampling
from tests.grpo_core.environments.scripted import Scripted, call, turns

pytestmark = [
    pytest.mark.served,
    pytest.mark.needs("bwrap"),
]
FORMAT = turns()
HERE = "tests.grpo_core.environments.playing"
EVALUATES = "string_insertion", "countdown"  # kinds whose verifiers evaluate the answer
SMALL = {"min_w": 6, "max_w": 6, "min_h": 6, "max_h": 6, "min_boxes": 1, "max_boxes": 1}  # others take minutes to make
PLAIN = """
import sys, reasoning_gym
for kind in sys.argv[2:]:
    tasks = reasoning_gym.create_dataset(kind, seed=3, size=1)
    try: tasks.score_answer(sys.argv[1], tasks[0])
    except Exception: continue
"""


@pytest.fixture
def marker(tmp_path: Path) -> Path:
    return tmp_path / "ran"


def hostile(marker: Path) -> list[str]:
    """Answers that make a file if they are evaluated, by a shell and by Python."""
    shell, python = f"__import__('os').system('touch {marker}')", f"open('{marker}','w')"
    return [shell, f"[{python}, {shell}]"]


@pytest.mark.parametrize("share", [pytest.param(1, marks=pytest.mark.e2e), 8])  # one kind in so many, and the worst
def test_no_kind_of_task_lets_an_answer_run_code_outside_of_the_sandbox(marker: Path, share: int) -> None:
    from reasoning_gym.composite import DatasetSpec
    from reasoning_gym.factory import DATASETS, create_dataset

    from grpo_core.environments.adapters.reasoning_gym import VERIFIER
    from grpo_core.system.sandbox.verifier import NoVerdictError

    asked: dict[str, Any] = {"sokoban": SMALL, "composite": {"datasets": [DatasetSpec(EVALUATES[0], 1.0, {})]}}
    judged = rejected = 0
    for kind in sorted({*sorted(DATASETS)[::share], *EVALUATES, "composite"}):
        options = asked.get(kind, {})
        task = create_dataset(kind, seed=3, size=1, **options)[0]
        for answer in [*hostile(marker), task["answer"]]:
            try:
                VERIFIER.score(dataset=kind, seed=3, options=options, answer=answer, task=task)
                judged += 1
            except NoVerdictError:
                rejected += 1
            assert not marker.exists(), kind
    assert len(DATASETS) > 100 and judged > 9 * rejected
    for kind in EVALUATES:
        subprocess.run([sys.executable, "-W", "ignore", "-c", PLAIN, hostile(marker)[0], kind], check=True)
        assert marker.exists(), "it would have"
        marker.unlink()


def _hold(config: dict[str, Any], answers: list[str], rows: list[dict[str, Any]]) -> list[Conversation]:
    environments = Environments(EnvironmentConfig(**config, tool_timeout=60.0))
    try:
        data = [{"prompt": [{"role": "user", "content": f"#{place}"}], **row} for place, row in enumerate(rows)]
        plays = [converse(row, 11, 9000, environments, FORMAT) for row in data]
        scripts = [[answer, "."] for answer in answers]
        found: dict[int, Conversation] = {}
        for ended in play(Scripted(scripts, FORMAT), plays, [0] * len(plays), Sampling(9000)):
            found |= dict(ended)
        return [found[place] for place in range(len(rows))]
    finally:
        environments.close()


def test_a_verifier_that_raises_or_takes_long_means_a_bad_answer_and_is_counted(marker: Path) -> None:
    answers = {"prime_factorization": "zzz", "countdown": "9**9**9", "string_insertion": hostile(marker)[0]}
    texts = [call("answer", f'{{"text": "{answer}"}}') for answer in answers.values()]
    talks = _hold({"environment_factory": "reasoning-gym"}, texts, [{"dataset": kind, "seed": 3} for kind in answers])
    assert [talk.said.reward for talk in talks] == [0.0, 0.0, 0.0] and {talk.said.failure for talk in talks} == {""}
    raised, slow, _ = (talk.said.verifier_error for talk in talks)
    assert raised.startswith("ValueError: invalid literal for int()") and "2 s of processor time" in slow
    metrics = conversation_metrics([talk.said for talk in talks[:2]])
    assert metrics["environment/verifier_errors"] == 1.0 and metrics["conversations/failed"] == 0.0
    assert not marker.exists()


def test_the_error_of_an_own_environment_stays_a_failure() -> None:
    (talk,) = _hold({"environment_factory": f"{HERE}:CannotJudge"}, ["."], [{}])
    assert talk.said.reward is None and talk.said.failure == "ValueError: invalid literal for int() with base 10: 'zzz'"
    metrics = conversation_metrics([talk.said])
    assert metrics["environment/verifier_errors"] == 0.0 and metrics["conversations/failed"] == 1.0
