"""verl's reward functions: `compute_score(data_source, solution_str, ground_truth, extra_info)`, called for one
completion at a time, gives a number, or a dictionary with the number as `score`.

`data_source`, `ground_truth` and `extra_info` are columns of the data, or the same for all rows in `args`, which also
has what verl calls `reward_kwargs`.
"""

from __future__ import annotations

import asyncio
import inspect
from collections.abc import Collection, Sequence
from typing import Any

from grpo_core.data.chat import text_of
from grpo_core.errors import RewardError
from grpo_core.rewards.builtin.record import RewardFunction

TEXT = "solution_str"
COLUMNS = ("data_source", "ground_truth", "extra_info")


def adapted(found: Any, args: Collection[str], what: str) -> RewardFunction:
    """The function as a reward of a whole batch."""
    if inspect.isclass(found):
        raise RewardError(f"{what} is a class; verl's rewards are functions: name the one that scores")
    parameters = inspect.signature(found).parameters
    takes_any = any(it.kind is it.VAR_KEYWORD for it in parameters.values())
    if TEXT not in parameters and not takes_any:
        raise RewardError(
            f"{what} takes {', '.join(parameters) or 'nothing'}; one of verl takes a completion as {TEXT!r}, with "
            f"{', '.join(COLUMNS)}: name that one, or write a reward with completions"
        )

    def calls(completions: Sequence[Any], given: dict[str, Any]) -> list[Any]:
        columns = {name: given.pop(name) for name in COLUMNS if name in given and name not in args}
        rows = ({name: values[i] for name, values in columns.items()} for i in range(len(completions)))
        return [found(**{TEXT: text_of(it)}, **row, **given) for it, row in zip(completions, rows, strict=True)]

    async def scores_when_ready(completions: Sequence[Any], **given: Any) -> list[Any]:
        return [_score(result) for result in await asyncio.gather(*calls(completions, given))]

    def scores(completions: Sequence[Any], **given: Any) -> list[Any]:
        return [_score(result) for result in calls(completions, given)]

    score: Any = scores_when_ready if inspect.iscoroutinefunction(found) else scores
    own = [
        parameters.get(name) or inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=None)
        for name in dict.fromkeys((*COLUMNS, *args))
        if name in parameters or takes_any
    ]
    first = inspect.Parameter("completions", inspect.Parameter.KEYWORD_ONLY)
    keyword = [it.replace(kind=it.KEYWORD_ONLY, annotation=it.empty) for it in own]
    vars(score).update(__signature__=inspect.Signature([first, *keyword]), __wrapped__=found)
    return score


def _score(result: Any) -> Any:
    if not isinstance(result, dict):
        return result
    if "score" not in result:
        raise RewardError(f"verl's compute_score returned a dictionary without 'score': it has {', '.join(result)}")
    return result["score"]
