"""Tokenizers with the chat templates of model families: byte by byte, with the family's special tokens."""

from __future__ import annotations

import re
from contextlib import suppress
from importlib.resources import files
from pathlib import Path
from typing import Any

import pytest
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from grpo_core.environments.calls import ToolCall
from grpo_core.environments.turns import ADD, TurnFormat

TAG = re.compile(r"<\|[^|<>\s]+\|>|<(?:start|end)_of_turn>|<turn\|>|\[/?[A-Z_]+\]|</s>")
CHATML = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
LLAMA = ("<|begin_of_text|>", "<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>", "<|python_tag|>")
# The last of the special tokens that a turn ends with, and how the policy writes a call.
XML = (
    "<tool_call>\n<function=add>\n<parameter=a>\n1\n</parameter>\n<parameter=b>\n2\n</parameter>\n</function>\n"
    "</tool_call>"
)
GLM = (
    "<tool_call>add\n<arg_key>a</arg_key>\n<arg_value>1</arg_value>\n<arg_key>b</arg_key>\n<arg_value>2</arg_value>\n"
    "</tool_call>"
)
HERMES = '<tool_call>\n{"name": "add", "arguments": {"a": 1, "b": 2}}\n</tool_call>'
FAMILIES: dict[str, tuple[tuple[str, ...], str, str]] = {
    "qwen2_5": (CHATML, "<|im_end|>", HERMES),
    "qwen3": (CHATML, "<|im_end|>", HERMES),
    "qwen3_instruct_2507": (CHATML, "<|im_end|>", HERMES),
    "qwen3_5_nothink": (CHATML, "<|im_end|>", XML),
    "glm4moe": (("[gMASK]", "<sop>", "<|user|>", "<|assistant|>", "<|observation|>"), "<|observation|>", GLM),
    "llama3_1": (LLAMA, "<|eot_id|>", '{"name": "add", "parameters": {"a": 1, "b": 2}}'),
    "llama3_2": (LLAMA, "<|eot_id|>", '{"name": "add", "parameters": {"a": 1, "b": 2}}'),
    "mistral": (
        ("<s>", "</s>", "[INST]", "[/INST]", "[TOOL_CALLS]", "[TOOL_RESULTS]", "[/TOOL_RESULTS]"),
        "</s>",
        '[TOOL_CALLS][{"name": "add", "arguments": {"a": 1, "b": 2}}]',
    ),
    "gemma3": (("<bos>", "<start_of_turn>", "<end_of_turn>"), "<end_of_turn>", ""),
}
# In the form that Mistral's models were trained on, which TRL does not bring.
MISTRAL = (
    "{{ bos_token }}{% for m in messages %}"
    "{% if m.role == 'user' %}[INST]{{ m.content }}[/INST]"
    "{% elif m.role == 'assistant' and m.tool_calls %}[TOOL_CALLS][{% for c in m.tool_calls %}"
    '{"name": "{{ c.function.name }}", "arguments": {{ c.function.arguments | tojson }}, "id": "{{ c.id }}"}'
    "{{ '' if loop.last else ', ' }}{% endfor %}]{{ eos_token }}"
    "{% elif m.role == 'assistant' %}{{ m.content }}{{ eos_token }}"
    "{% elif m.role == 'tool' %}{% if m.tool_call_id is not defined or m.tool_call_id | length != 9 %}"
    "{{ raise_exception('a tool answers a call, whose id has nine characters') }}{% endif %}"
    '[TOOL_RESULTS]{"content": {{ m.content | tojson }}, "call_id": "{{ m.tool_call_id }}"}[/TOOL_RESULTS]'
    "{% endif %}{% endfor %}"
)


def tokenizer_of(family: str) -> Any:
    """A tokenizer with the family's template and special tokens."""
    special, end, _ = FAMILIES[family]
    return make_tokenizer(template_of(family), special, end)


def template_of(family: str) -> str:
    """The family's chat template."""
    return MISTRAL if family == "mistral" else _from_trl(family)


def known_to_trl() -> list[str]:
    """Names of the families whose templates TRL has copies of; of images' too."""
    return sorted(path.name.removesuffix(".jinja") for path in _folder_of_trl().iterdir() if path.suffix == ".jinja")


def format_of(family: str) -> TurnFormat:
    """The way in which TRL's copy of a template writes turns; its special tokens and ends are found in the text."""
    template = _from_trl(family)
    special = (*dict.fromkeys(TAG.findall(template)), "</s>")
    tokenizer, call = make_tokenizer(template, special, "</s>"), ToolCall("z", {}).message
    ends = ["</s>"]
    for turn in ({"content": "zz"}, {"content": "", "tool_calls": [{"id": "call00000", **call}]}):
        said = [{"role": "user", "content": "x"}, {"role": "assistant", **turn}]
        answer = {"role": "tool", "name": "z", "tool_call_id": "call00000", "content": "y"}
        with suppress(Exception):  # a template may raise anything
            text = tokenizer.apply_chat_template([*said, answer], tools=[ADD], tokenize=False)
            ends += TAG.findall(text.rpartition("z")[2])[:1]
    return TurnFormat(tokenizer, tuple(ends), {})


def make_tokenizer(template: str, special: tuple[str, ...], end: str) -> Any:
    bytes_ = sorted(pre_tokenizers.ByteLevel.alphabet())
    plain = Tokenizer(models.BPE(vocab={byte: i for i, byte in enumerate(bytes_)}, merges=[]))
    plain.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    plain.decoder = decoders.ByteLevel()
    plain.add_special_tokens([AddedToken(token, special=True) for token in special])
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=plain, bos_token=special[0], eos_token=end, additional_special_tokens=list(special)
    )
    tokenizer.chat_template, tokenizer.name_or_path = template, "a model"
    return tokenizer


def _from_trl(family: str) -> str:
    """The family's own template, of which TRL keeps copies."""
    return (_folder_of_trl() / f"{family}.jinja").read_text()


def _folder_of_trl() -> Path:
    pytest.importorskip("trl", reason="needs requirements/bench.txt")
    return Path(str(files("trl") / "chat_templates"))
