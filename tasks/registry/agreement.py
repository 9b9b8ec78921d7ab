"""Whether the answers of a model version are those of its evaluation, however the version is asked."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from grpo_core import run_files
from grpo_core.config.evaluation import HELD_OUT
from grpo_core.config.files import load_config
from grpo_core.data.chat import completion_of
from grpo_core.data.images import beside
from grpo_core.data.prompts import FileRows, load_tokenizer
from grpo_core.errors import GrpoError
from grpo_core.planning.plan import load_plan
from grpo_core.rewards.batch import Batch, ended_ids
from grpo_core.rewards.composition import weighted_sum
from grpo_core.rewards.contract import rewards_of
from grpo_core.rewards.scoring import score
from grpo_core.rewards.trl_arguments import TrainerState

# Difference of the two highest log-probabilities within which rounding may choose either token: in float32 on a CPU,
# and in bfloat16 or by a GPU's kernels.
EXACT, ROUNDED = 1e-3, 0.25

# A greedy answer, token by token: the text up to each, and whether another one is equally likely, except for rounding.
Steps = Sequence[tuple[str, bool]]


@dataclass(frozen=True)
class Asked:
    """The version's answer to a held-out prompt, and the evaluation's. `steps`: gives one of them, token by token."""

    row: int
    served: str
    evaluated: str
    steps: Callable[[], Steps]


@dataclass(frozen=True)
class Agreement:
    """Number of compared prompts, of equal answers, and of ties: answers whose first differing token is one of two that
    are equally likely, except for rounding.

    differing: row and first differing token of each other one, with both answers. reward_change: the mean reward of the
    version's answers minus that of the evaluation's, over the compared prompts; None if it is not known.
    """

    compared: int
    equal: int
    ties: int
    differing: list[dict[str, Any]]
    reward_change: float | None


def compare(asked: Iterable[Asked]) -> tuple[Agreement, list[Asked]]:
    """Compare the answers, without rewards, which may fail or hang; also returns those that are not equal."""
    compared, differing = [*asked], list[dict[str, Any]]()
    others = [each for each in compared if each.served != each.evaluated]
    for each in others:
        token, is_tie = departure(each.steps(), each.served, each.evaluated)
        if not is_tie:
            differing.append({"row": each.row, "token": token, "served": each.served, "evaluated": each.evaluated})
    equal, ties = len(compared) - len(others), len(others) - len(differing)
    return Agreement(len(compared), equal, ties, differing, None if others else 0.0), others


def with_reward_change(found: Agreement, others: Sequence[Asked], run: Path) -> Agreement:
    """The agreement with how the reward changes by the answers that are not equal."""
    change = reward_change(run, others) if others else 0.0
    return found if change is None else replace(found, reward_change=change / max(found.compared, 1))


def departure(steps: Steps, *answers: str) -> tuple[int, bool]:
    """Number, from 1, of the greedy answer's first token at which one of these texts differs from it; 0 without tokens.
    Beside it: is it, or one just before that shows no text, such as an end token, as likely as another?"""
    if not steps:
        return 0, False
    texts = ["", *(text for text, _ in steps)]
    [other, *_] = [text for text in answers if text != texts[-1]]
    last = len(steps) - 1  # where the other text goes on
    first = next((n for n in range(last) if not other.startswith(texts[n + 1])), last)
    return first + 1, any(is_tie for _, is_tie in steps[texts.index(texts[first]) : first + 1])


def reward_change(run: Path, others: Sequence[Asked]) -> float | None:
    """The sum of the run's rewards for the version's answers minus those for the evaluation's, tokenized again. None if
    a reward fails, which is printed, or if there is an environment."""
    config, plan = load_config(run / run_files.CONFIG), load_plan(run / run_files.PLAN)
    if config.environment.is_used:
        return None
    prompts = FileRows(run_files.prompts(run, config.evaluation_files[HELD_OUT]))
    rows = [prompts[each.row] for each in others for _ in range(2)]
    texts = [text for each in others for text in (each.evaluated, each.served)]
    completions = [completion_of(row["prompt"], text) for row, text in zip(rows, texts, strict=True)]
    ids, state = ended_ids(load_tokenizer(config.model), texts), TrainerState.after(plan.max_steps, plan)
    try:
        given = np.array(
            score(rewards_of(config), Batch(rows, completions, ids, state=state, images=beside(prompts.path)))
        ).T
        sums = weighted_sum(given, config.rewards)
    except (GrpoError, OSError) as error:
        print(f"by how much the reward changes is not known: {error}", flush=True)
        return None
    return float(np.nansum(sums[1::2] - sums[::2]))
