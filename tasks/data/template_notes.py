"""What tokenizer and chat template do to texts that a run counts on: tags, ends of turns, dates."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

from grpo_core.config.run import RunConfig
from grpo_core.data.chat import is_conversation, without_gaps
from grpo_core.environments.setting import end_texts
from grpo_core.rewards.builtin.form import required_text
from grpo_core.rewards.registry import BUILTIN
from tasks.data.lengths import Options

MARK = "pageturn"  # of letters only: templates may trim what a message says
OPENING = re.compile(r"<[A-Za-z][\w-]*>")  # a tag


def template_notes(config: RunConfig, tokenizer: Any, prompt: Any, options: Options) -> list[str]:
    """Warnings about texts that no completion can contain, turns that the engine does not end, and prompts that change
    with the day. `prompt`: one of the data that the template takes; `options`: variables of the template."""
    found = [*_unseen_tokens(config, tokenizer)]
    if is_conversation(prompt):
        messages = without_gaps(prompt)

        def render(messages: list[dict[str, Any]], **more: Any) -> str:
            return tokenizer.apply_chat_template(messages, tokenize=False, **{**options, **more})

        try:
            opened, unopened = (render(messages, add_generation_prompt=generates) for generates in (True, False))
            days = [render(messages, strftime_now=lambda _, day=day: day) for day in ("Monday", "Tuesday")]
            turn = render([{"role": "user", "content": "x"}, {"role": "assistant", "content": MARK}])
        except Exception:  # a template is a program and may raise anything, for instance without a system message
            return found
        if opened.startswith(unopened):
            found += _tags_of_prompt(config, opened.removeprefix(unopened))
        found += [*_dates(*days), *_unended_turns(config, tokenizer, turn.rpartition(MARK)[2])]
    return found


def _looked_for(config: RunConfig) -> dict[str, str]:
    """Text that is looked for in completions, by what looks for it."""
    records = {reward.name: (BUILTIN.get(reward.function), reward.args) for reward in config.rewards}
    return {
        **{f"reward {name!r}": record.looks_for(args) for name, (record, args) in records.items() if record},
        "rollout.stop": " ".join(config.rollout.stop),
        "evaluation.answer_pattern": required_text(config.evaluation.answer_pattern or ""),
    }


def _unseen_tokens(config: RunConfig, tokenizer: Any) -> Iterator[str]:
    """Warnings about special tokens that something looks for: completions are read without them, as in TRL."""
    special = {*tokenizer.all_special_ids, *tokenizer.added_tokens_decoder}
    for who, text in _looked_for(config).items():
        named = {token for token in tokenizer.convert_ids_to_tokens(sorted(special)) if token in text}
        ids = {token: tokenizer.convert_tokens_to_ids(token) for token in sorted(named)}
        if unseen := [token for token, number in ids.items() if not tokenizer.decode([number], True)]:
            yield (
                f"{who} looks for {' and '.join(map(repr, unseen))}, which the tokenizer has as special tokens: "
                "completions are read without them, so it is never found. Look for a text that is none, or, in a copy "
                "of the model's folder, set special to false for it in tokenizer.json and tokenizer_config.json"
            )


def _tags_of_prompt(config: RunConfig, generation_prompt: str) -> Iterator[str]:
    """Warnings about opening tags that something looks for and the template writes before the completion begins."""
    for who, text in _looked_for(config).items():
        if tags := [tag for tag in dict.fromkeys(OPENING.findall(generation_prompt)) if tag in text]:
            yield (
                f"{who} looks for {' and '.join(map(repr, tags))}, which the chat template writes at the end of the "
                f"prompt ({generation_prompt[-40:]!r}): completions begin after it, so it is not found there. In a "
                f"pattern, let it be absent, as in ({tags[0]})?.*; of args.tags, leave it out"
            )


def _dates(first: str, second: str) -> Iterator[str]:
    """A warning if two days' prompts differ."""
    if first != second:
        yield (
            "the chat template writes the day's date into each prompt (strftime_now): a training that goes on on "
            "another day, and the evaluation after it, have other prompts. If the template has a variable for the date "
            "(date_string in Llama's), set it in data.chat_template_kwargs"
        )


def _unended_turns(config: RunConfig, tokenizer: Any, after: str) -> Iterator[str]:
    """A warning if what the template writes after a turn has no text at which the engine ends a completion."""
    ends = end_texts(config, tokenizer)
    if after.strip() and not any(end in after for end in (*ends, *config.rollout.stop)):
        named = f"completions end at {' or '.join(map(repr, ends))}" if ends else "no token ends a completion"
        yield (
            f"the chat template ends turns by {after[:20]!r}, and {named}: a "
            "model that was trained on the template writes on to the length limit. Set eos_token_id in the model's "
            "generation_config.json to the token that ends a turn, or rollout.stop to its text if it is no token"
        )
