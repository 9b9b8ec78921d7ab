"""What tokenizer and chat template do to texts that a run counts on is said before the training."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import polars as pl
import pytest
from tokenizers.processors import TemplateProcessing
from transformers import AutoTokenizer

from grpo_core.config.files import parse_config
from grpo_core.data.prompts import load_prompts
from grpo_core.errors import ConfigError
from grpo_core.rewards.builtin.form import format_regex, required_text
from tests.conftest import config_values, make_model
from tests.rows import screen

TURNS = "{% for m in messages %}<{{ m.role }}>{{ m.content }}[END]{% endfor %}{% if add_generation_prompt %}<a>"
PLAIN = TURNS + "{% endif %}"
THINKS = TURNS + "<think>\n{% endif %}"
DATED = "{{ date if date is defined else strftime_now('%d') }}" + PLAIN
CONVERSATION = [{"role": "user", "content": "1+1="}]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model whose tokenizer ends with [END], and has <think> and </think> as special tokens."""
    path = make_model(tmp_path_factory.mktemp("model"), num_hidden_layers=1, vocab_size=32)
    tokenizer = AutoTokenizer.from_pretrained(path)
    tokenizer.add_special_tokens({"additional_special_tokens": ["<think>", "</think>", "[END]"], "eos_token": "[END]"})
    tokenizer.save_pretrained(path)
    return path


def _notes(folder: Path, data: Path, template: str, *rewards: dict[str, Any], keys: Any = (), **more: Any) -> list[str]:
    prompts = [[{"role": "user", "content": f"{n}+1="}] for n in range(20, 30)]
    for name, rows in {"train": prompts[:6], "eval": prompts[6:]}.items():
        pl.DataFrame({"prompt": rows, "answer": ["1"] * len(rows)}).write_parquet(data / f"{name}.parquet")
    values = config_values(folder, data, **dict(keys)) | ({"rewards": list(rewards)} if rewards else {})
    values["data"] |= more
    tokenizer = AutoTokenizer.from_pretrained(folder)
    shutil.copytree(folder, data / "own", dirs_exist_ok=True)
    tokenizer.chat_template = template
    tokenizer.save_pretrained(data / "own")
    values["model"]["name_or_path"] = str(data / "own")
    screened = screen(parse_config(values))
    assert not screened.refused, screened.shape
    return screened.notes


FORM = {"function": "format_regex", "args": {"pattern": "<think>.*</think>.*"}}
OPTIONAL = {"function": "format_regex", "args": {"pattern": "(<thought>)?.*</thought>.*"}}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("reward", "keys", "said"),
    [
        (FORM, {}, "reward 'format_regex' looks for '</think>' and '<think>'"),
        ({"function": "tags", "name": "form"}, {}, "reward 'form' looks for '</think>' and '<think>'"),
        ({"function": "tags", "args": {"tags": ["answer"]}}, {}, ""),
        ({"function": "numeric_match"}, {"stop": ["[END]"]}, "rollout.stop looks for '[END]'"),
        ({"function": "numeric_match"}, {}, ""),
    ],
)
def test_a_text_that_is_a_special_token_is_never_found_in_a_completion(
    folder: Path, tmp_path: Path, reward: dict[str, Any], keys: dict[str, Any], said: str
) -> None:
    notes = _notes(folder, tmp_path, PLAIN, reward, keys=keys)
    assert [f"{said}, which the tokenizer has as special tokens" in note for note in notes] == [True] * bool(said)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("reward", "warns"),
    [
        ({"function": "tags", "args": {"tags": ["thought", "answer"]}}, True),
        ({"function": "format_regex", "args": {"pattern": "\\s*(?P<all><thought>.*</thought>)(.*)"}}, True),
        (OPTIONAL, False),
        ({"function": "numeric_match"}, False),
    ],
)
@pytest.mark.parametrize("closed", ["", "</thought>"], ids=["opened", "opened and closed"])
def test_a_tag_that_the_template_writes_itself_is_not_in_the_completion(
    folder: Path, tmp_path: Path, reward: dict[str, Any], warns: bool, closed: str
) -> None:
    template = TURNS + f"<thought>\n{closed}" + "{% endif %}"
    notes = _notes(folder, tmp_path, template, reward)
    said = "looks for '<thought>', which the chat template writes at the end of the prompt"
    assert [said in note for note in notes] == [True] * warns


def test_the_pattern_of_the_documentation_scores_with_and_without_a_template_that_opens_the_tag() -> None:
    pattern = "(<think>)?.*</think>.*"
    assert f'pattern = "{pattern}"' in Path("docs/how-to/own-rewards.md").read_text()
    assert format_regex(["<think>2</think>4", "2</think>4", "4", "<think>2"], pattern) == [1.0, 1.0, 0.0, 0.0]


@pytest.mark.parametrize(
    ("pattern", "required", "absent"),
    [
        ("<think>.*</think>.*", ["<think>", "</think>"], []),
        (r"^<\|think\|>(?!.*<x>)(.*?)</y>$", ["<|think|>", "</y>"], ["<x>"]),
        (r"(?:(<think>)\s*)?.*</think>", ["</think>"], ["<think>"]),
        (r"(a|<think>)b", ["b"], ["<think>"]),
        (r"<think>a|b", [], ["<think>"]),
        (r"\(<think>\)?(?P<it>(<a>)+)", ["<think>", "<a>"], []),
    ],
)
def test_the_text_that_a_pattern_requires(pattern: str, required: list[str], absent: list[str]) -> None:
    found = required_text(pattern)
    assert [text in found for text in [*required, *absent]] == [True] * len(required) + [False] * len(absent)


@pytest.mark.slow
def test_a_template_that_writes_the_date_is_named_unless_the_date_is_set(folder: Path, tmp_path: Path) -> None:
    (note,) = _notes(folder, tmp_path, DATED)
    assert "writes the day's date into each prompt (strftime_now)" in note
    assert not _notes(folder, tmp_path, DATED, chat_template_kwargs={"date": "1 May"})


@pytest.mark.slow
@pytest.mark.parametrize(("stop", "end", "warns"), [([], None, True), (["\n#"], None, False), ([], "#", False)])
def test_a_turn_that_the_engine_would_not_end_is_named(
    folder: Path, tmp_path: Path, stop: list[str], end: str | None, warns: bool
) -> None:
    template = PLAIN.replace("[END]", "\n#" if end is None else end)
    if end is not None:
        folder = Path(shutil.copytree(folder, tmp_path / "chosen"))
        tokenizer = AutoTokenizer.from_pretrained(folder)
        tokenizer.add_tokens([end])
        tokenizer.save_pretrained(folder)
        ends = {"eos_token_id": tokenizer.convert_tokens_to_ids(end)}
        (folder / "generation_config.json").write_text(json.dumps(ends))
    notes = _notes(folder, tmp_path, template, keys={"stop": stop})
    said = "the chat template ends turns by '\\n#', and completions end at '"
    assert [said in note for note in notes] == [True] * warns


def test_a_tokenizer_without_an_end_token_is_said_to_have_none(tmp_path: Path) -> None:
    folder = make_model(tmp_path / "model", num_hidden_layers=1, eos_token_id=None)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    tokenizer.eos_token = None
    tokenizer.save_pretrained(folder)
    (note,) = [note for note in _notes(folder, tmp_path, PLAIN) if "ends turns by" in note]
    assert note.startswith("the chat template ends turns by '[END]', and no token ends a completion: a model that")


def test_prompts_that_would_begin_twice_are_refused(tmp_path: Path) -> None:
    folder = make_model(tmp_path / "model", num_hidden_layers=1)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    tokenizer.add_special_tokens({"bos_token": "[BOS]"})
    begin = ("[BOS]", tokenizer.bos_token_id)
    tokenizer.backend_tokenizer.post_processor = TemplateProcessing("[BOS] $A", special_tokens=[begin])
    tokenizer.save_pretrained(folder)
    for name in ("train", "eval"):
        prompts = [f"{'[BOS]' * (n == 4)}{n}+{len(name)}=" for n in range(8)]
        pl.DataFrame({"prompt": prompts, "answer": ["1"] * 8}).write_parquet(tmp_path / f"{name}.parquet")
    said = r"puts its begin token before each prompt, and the prompt '\[BOS\]4"
    (problem,) = screen(parse_config(config_values(folder, tmp_path))).shape
    assert "puts its begin token before each prompt, and the prompt '[BOS]4" in problem
    pl.DataFrame({"prompt": ["[BOS]4+1="]}).write_parquet(tmp_path / "one.parquet")
    with pytest.raises(ConfigError, match=said):
        load_prompts(tmp_path / "one.parquet", tokenizer)
    tokenizer.backend_tokenizer.post_processor = TemplateProcessing("$A", special_tokens=[])
    assert load_prompts(tmp_path / "one.parquet", tokenizer).ids[0][:1] == [tokenizer.bos_token_id]
