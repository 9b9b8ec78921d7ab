"""The environments and the format of turns with which a process holds conversations."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from grpo_core.config.run import RunConfig
from grpo_core.data.chat import is_conversation, without_gaps
from grpo_core.environments.calls import SIGNS
from grpo_core.environments.conversation import Conversation, Play, Said, converse
from grpo_core.environments.processes import Environments, Seen
from grpo_core.environments.registry import EnvironmentsError
from grpo_core.environments.turns import TurnFormat
from grpo_core.rewards.batch import short


@dataclass(frozen=True)
class Setting:
    """The environments, and the way in which the model's chat template writes turns."""

    environments: Environments
    turns: TurnFormat

    def encode(self, row: Mapping[str, Any], added: str | None = None) -> list[int]:
        """Token ids of the row's prompt with its tools, and with what `reset` has `added`."""
        tools = self.environments.tools(self.environments.name_for(row))
        return self.turns.prompt(without_gaps(row["prompt"]), [*tools.values()], added)

    def options(self, name: str) -> dict[str, Any]:
        """Options of the chat template for this environment's rows, as in `encode`."""
        return {**self.turns.options, "tools": [*self.environments.tools(name).values()] or None}

    def converse(self, row: Mapping[str, Any], seed: int, max_tokens: int) -> Play:
        """A conversation about the row; see `conversation.converse`."""
        return converse(row, seed, max_tokens, self.environments, self.turns)

    def unread_calls(self, held: Sequence[Said]) -> str:
        """A warning if no tool was called in these conversations, though what was said has signs of calls; else ""."""
        names = {tool for name in ("", *self.environments.own) for tool in self.environments.tools(name)}
        signs = [*SIGNS, *(f"{name}{mark}" for name in names for mark in '("')]
        texts = [text["content"] for said in held for text in said.messages if text["role"] == "assistant"]
        found = [text for text in texts if any(sign in text for sign in signs)]
        if not found or any(name for said in held for name in said.calls):
            return ""
        return (
            f"no tool was called in {len(held)} conversations, and {len(found)} of their {len(texts)} turns look as if "
            f"they meant to, the first by {short(found[0])}. Calls are read as the model's chat template writes them "
            f"(form {self.turns.form!r}), after the thought if a turn begins with one; take a model that writes them so"
        )

    def seen(self, talk: Conversation) -> Seen:
        """The environment of a conversation, for reward functions."""
        return Seen(talk.environment, talk.said.reward, self.environments.config.tool_timeout)


def make_setting(config: RunConfig, tokenizer: Any) -> Setting | None:
    """The configured environments and tools; None if there are none. Raises EnvironmentsError if they cannot be used,
    or the model's chat template cannot write their answers."""
    if not config.environment.is_used:
        return None
    turns = TurnFormat(tokenizer, end_texts(config, tokenizer), config.data.chat_template_kwargs)
    if problem := turns.problem():
        raise EnvironmentsError(f"environment: {problem}")
    return Setting(Environments(config.environment), turns)


def check_prompt(prompt: Any) -> None:
    """Raises EnvironmentsError if no conversation can begin with this prompt."""
    if not is_conversation(prompt):
        raise EnvironmentsError(
            "environment: the prompts are texts; tools and environments need messages, such as "
            '[{"role": "user", "content": …}]'
        )


def end_texts(config: RunConfig, tokenizer: Any) -> tuple[str, ...]:
    """Texts of the tokens at which the engine ends a turn: the tokenizer's and the model's."""
    from transformers import GenerationConfig

    ids, model = {tokenizer.eos_token_id}, config.model
    try:
        own = GenerationConfig.from_pretrained(model.name_or_path, revision=model.revision or "main").eos_token_id
    except OSError:  # the model has no such file
        own = None
    ids |= {*own} if isinstance(own, list) else {own}
    return tuple(tokenizer.convert_ids_to_tokens(sorted(ids - {None})))
