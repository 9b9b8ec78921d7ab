"""Rewards that were written for verl and ms-swift give, unchanged, what those frameworks would have got of them."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest

from grpo_core.config.inputs import RewardConfig
from grpo_core.errors import RewardError
from grpo_core.rewards.batch import Batch
from grpo_core.rewards.contract import Reward, resolve
from grpo_core.rewards.scoring import score

OF_VERL = """
def compute_score(data_source, solution_str, ground_truth, extra_info=None):
    right = solution_str.split("#### ")[-1] == ground_truth
    return {"score": 1.0 if right else -1.0, "acc": right, "of": extra_info["index"]} if data_source == "own" else 0.5
def exact(solution_str, ground_truth, method="strict", score=1.0):
    assert method in ("strict", "flexible"), method
    return score if solution_str == ground_truth else 0
def any_of(**kwargs):
    return len(kwargs["solution_str"]) + kwargs["bonus"] + kwargs["extra_info"]["index"]
async def later(data_source, solution_str, ground_truth, extra_info):
    return float(solution_str == ground_truth)
def unnamed(solution_str): return {"reward": 1.0}
def of_batch(data_sources, solution_strs, ground_truths, extra_infos): return [0.0] * len(solution_strs)
"""
OF_SWIFT = """
from typing import List
from swift.rewards import ORM, AsyncORM, orms
from swift.utils import get_logger
logger = get_logger()
class Accuracy(ORM):
    def __call__(self, completions, solution, **kwargs) -> List[float]:
        return [float(text.strip() == right) for text, right in zip(completions, solution)]
class Later(AsyncORM):
    async def __call__(self, completions, solution, **kwargs):
        return [float(text == right) for text, right in zip(completions, solution)]
class Seen(ORM):
    def __call__(self, infer_requests, messages, response_token_ids):
        roles = [[message["role"] for message in each] for each in messages]
        assert roles == [["user", "assistant"]] * len(infer_requests), roles
        return [float(len(ids)) for ids in response_token_ids]
class All(ORM):
    def __call__(self, completions, **kwargs):
        rows = zip(kwargs["messages"], kwargs["response_token_ids"], kwargs["solution"])
        return [float(len(messages) + len(ids) + len(right)) for messages, ids, right in rows]
class Asks(ORM):
    def __init__(self, args):
        self.length = args.length
    def __call__(self, completions, **kwargs):
        return [float(len(text) > self.length) for text in completions]
class Given: length = 1
asks = Asks(Given)
orms["accuracy_of_mine"] = Accuracy
"""
ROWS = [
    {"data_source": source, "ground_truth": "7", "solution": "7", "extra_info": {"index": n}, "score": 9.0}
    for n, source in enumerate(("own", "own", "other"))
]


@pytest.fixture(autouse=True)
def modules(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "of_verl.py").write_text(OF_VERL)
    (tmp_path / "of_swift.py").write_text(OF_SWIFT)
    monkeypatch.syspath_prepend(tmp_path)


def _reward(function: str, **keys: Any) -> Reward:
    return resolve(RewardConfig(function=function, **keys))


def _values(reward: Reward, in_conversations: bool) -> list[float]:
    texts = ["#### 7", "7", "8"]
    prompts = [[{"role": "user", "content": "3+4"}] if in_conversations else "3+4"] * 3
    completions = [[{"role": "assistant", "content": text}] if in_conversations else text for text in texts]
    rows = [{**row, "prompt": prompt} for row, prompt in zip(ROWS, prompts, strict=True)]
    (values,) = score([reward], Batch(rows, completions, [[1] * len(text) for text in texts]))
    return values


@pytest.mark.parametrize("in_conversations", [False, True])
@pytest.mark.parametrize(
    ("function", "args", "columns", "values"),
    [
        ("verl:of_verl:compute_score", {}, {"data_source", "ground_truth"}, [1, 1, 0.5]),
        ("verl:of_verl:compute_score", {"data_source": "none"}, {"ground_truth"}, [0.5, 0.5, 0.5]),
        ("verl:of_verl:exact", {"score": 2.0}, {"ground_truth"}, [0, 2, 0]),
        ("verl:of_verl:exact", {}, {"ground_truth"}, [0, 1, 0]),  # the column `score` is not its argument
        ("verl:of_verl:any_of", {"bonus": 10}, set(), [16, 12, 13]),
        ("verl:of_verl:later", {}, {"data_source", "ground_truth", "extra_info"}, [0, 1, 0]),
        ("swift:of_swift:Accuracy", {}, {"solution"}, [0, 1, 0]),
        ("swift:of_swift:Later", {}, {"solution"}, [0, 1, 0]),
        ("swift:of_swift:Seen", {}, set(), [6, 1, 1]),
        ("swift:of_swift:All", {}, set(), [9, 4, 4]),
        ("swift:of_swift:asks", {}, set(), [1, 0, 0]),
    ],
)
def test_a_reward_of_another_framework_scores_text_and_conversations(
    function: str, args: dict[str, Any], columns: set[str], values: list[float], in_conversations: bool
) -> None:
    reward = _reward(function, args=args)
    assert (reward.name, set(reward.columns)) == (function.rpartition(":")[2], columns)
    assert reward.is_async == function.lower().endswith("later")
    assert _values(reward, in_conversations) == values


@pytest.mark.slow
@pytest.mark.parametrize("function", ["verl:of_verl:compute_score", "swift:of_swift:Accuracy"])
def test_its_own_process_gives_the_same(function: str) -> None:
    isolated = _reward(function, isolated=True)
    assert isolated.process
    assert _values(isolated, True) == _values(_reward(function), True)
    isolated.process.end()


@pytest.mark.parametrize(
    ("function", "message"),
    [
        (
            "of_swift:Accuracy",
            "is a class: write 'swift:of_swift:Accuracy' if it is a reward of ms-swift; else make an",
        ),
        ("of_verl:exact", "takes a parameter 'solution_str': write 'verl:of_verl:exact' if it is a reward of verl"),
        ("swift:of_swift:Asks", r"cannot be made without arguments.*as in reward = Asks\(…\), and name that object"),
        ("swift:of_swift:logger", "is a RootLogger, not a function or an object to be called"),
        ("swift:of_swift:ORM", "makes a _ORM that cannot be called: it has no __call__"),
        ("verl:of_swift:Accuracy", "is a class; verl's rewards are functions"),
        ("swift:of_swift:gone", "does not define 'gone'"),
        ("verl:of_verl:of_batch", "takes data_sources.*; one of verl takes a completion as 'solution_str'"),
        ("verl:gone:compute_score", "there is no module 'gone'; put gone.py"),
        ("trl.rewards:accuracy_reward", "trl is not installed here: take the built-in reward for it"),
        ("imports_swift:Near", "it imports 'swift.rewards'; ms-swift is not installed here: name its reward 'swift:"),
        (
            "imports_trl:near",
            "it imports 'trl'; trl is not installed here: take the built-in reward.* copy what it needs",
        ),
    ],
)
def test_what_is_named_wrongly_is_refused_with_the_name_that_works(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, function: str, message: str
) -> None:
    monkeypatch.setitem(sys.modules, "trl", None)  # as where it is not installed
    (tmp_path / "imports_trl.py").write_text("from trl import GRPOTrainer\n")
    (tmp_path / "imports_swift.py").write_text("from swift.rewards import ORM\n")
    if "imports_swift" in function:
        monkeypatch.setitem(sys.modules, "swift.rewards", None)
    with pytest.raises(RewardError, match=message):
        if function == "of_swift:Accuracy":
            _reward(f"swift:{function}")  # imports the module
        _reward(function)


def test_a_dictionary_without_a_score_is_refused() -> None:
    with pytest.raises(RewardError, match="a dictionary without 'score': it has reward"):
        _values(_reward("verl:of_verl:unnamed"), False)


def test_an_argument_that_it_does_not_take_is_refused() -> None:
    with pytest.raises(RewardError, match=r"takes no argument \['metod'\]"):
        _reward("verl:of_verl:exact", args={"metod": "flexible"})
