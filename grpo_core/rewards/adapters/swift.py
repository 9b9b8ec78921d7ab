"""ms-swift's rewards: a class derived from `ORM` or `AsyncORM`, whose objects are called with the completions' texts
and with the columns that they name.

Beside the columns they get what ms-swift gives them: `messages` (prompt and completion) and `response_token_ids`.
"""

from __future__ import annotations

import importlib.util
import inspect
import logging
import sys
import types
from collections.abc import Collection, Sequence
from typing import Any

from grpo_core.data.chat import is_conversation, text_of
from grpo_core.errors import RewardError
from grpo_core.rewards.builtin.record import RewardFunction

FROM_PROMPTS, FROM_IDS = "messages", "response_token_ids"


class _ORM:
    """Base class of a reward, as ms-swift's."""

    def __init__(self, args: Any = None, **kwargs: Any) -> None:
        self.args = args


def provide_bases() -> None:
    """Let modules import the base classes and the table of rewards where ms-swift is not installed."""
    if "swift" in sys.modules or importlib.util.find_spec("swift"):
        return
    bases = {"ORM": _ORM, "AsyncORM": type("AsyncORM", (_ORM,), {}), "orms": {}}
    for name in ("swift.rewards", "swift.rewards.orm", "swift.plugin", "swift.plugin.orm"):
        _provide(name, bases)
    _provide("swift.utils", {"get_logger": logging.getLogger})


def _provide(name: str, content: dict[str, Any]) -> None:
    parent, _, child = name.rpartition(".")
    if parent and parent not in sys.modules:
        _provide(parent, {})
    module = sys.modules.setdefault(name, types.ModuleType(name))
    vars(module).update(content, __path__=[])
    if parent:
        setattr(sys.modules[parent], child, module)


def adapted(found: Any, args: Collection[str], what: str) -> RewardFunction:
    """The class's object, or an object or function of a module, as a reward that takes conversations too."""
    reward = _made(found, what) if inspect.isclass(found) else found
    if not callable(reward):
        raise RewardError(f"{what} makes a {type(reward).__name__} that cannot be called: it has no __call__")
    parameters = [*inspect.signature(reward).parameters.values()]
    takes_any = any(it.kind is it.VAR_KEYWORD for it in parameters)
    names = {it.name for it in parameters}

    def given_to(completions: Sequence[Any], given: dict[str, Any]) -> dict[str, Any]:
        if takes_any or FROM_PROMPTS in names:
            prompts = given["prompts"]
            given[FROM_PROMPTS] = [_messages(*pair) for pair in zip(prompts, completions, strict=True)]
        if takes_any or FROM_IDS in names:
            given[FROM_IDS] = given["completion_ids"]
        return {key: value for key, value in given.items() if takes_any or key in names}

    async def scores_when_ready(completions: Sequence[Any], **given: Any) -> Any:
        return await scores(completions, **given)

    def scores(completions: Sequence[Any], **given: Any) -> Any:
        return reward([text_of(it) for it in completions], **given_to(completions, given))

    is_async = inspect.iscoroutinefunction(reward) or inspect.iscoroutinefunction(type(reward).__call__)
    score: Any = scores_when_ready if is_async else scores
    ours = [inspect.Parameter("completions", inspect.Parameter.KEYWORD_ONLY)]
    ours += [
        inspect.Parameter(argument, inspect.Parameter.KEYWORD_ONLY)
        for argument, name in (("prompts", FROM_PROMPTS), ("completion_ids", FROM_IDS))
        if takes_any or name in names
    ]
    taken = {FROM_PROMPTS, FROM_IDS, *(it.name for it in ours)}
    own = [it for it in parameters[1:] if it.name not in taken and it.kind is not it.VAR_POSITIONAL]
    own = [it if it.kind is it.VAR_KEYWORD else it.replace(kind=it.KEYWORD_ONLY) for it in own]
    vars(score).update(__signature__=inspect.Signature([*ours, *own]), __wrapped__=reward)
    return score


def _made(found: type, what: str) -> Any:
    try:
        return found()
    except Exception as error:  # a user's code, which may do anything
        raise RewardError(
            f"{what} cannot be made without arguments: {type(error).__name__}: {error}; make it at the top level of "
            f"its module, as in reward = {found.__name__}(…), and name that object"
        ) from error


def _messages(prompt: Any, completion: Any) -> list[Any]:
    asked = prompt if is_conversation(prompt) else [{"role": "user", "content": prompt}]
    written = completion if is_conversation(completion) else [{"role": "assistant", "content": completion}]
    return [*asked, *written]
