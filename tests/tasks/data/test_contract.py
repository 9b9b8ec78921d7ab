"""Each kind of bad data is found, with dataset, row, column and value; what becomes of it, the configuration says."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any, get_args

import polars as pl
import pytest
from tokenizers.processors import TemplateProcessing
from transformers import AutoTokenizer, PreTrainedTokenizerFast

from grpo_core.config.files import parse_config
from grpo_core.config.inputs import DataChecks
from grpo_core.config.run import RunConfig
from tasks.data import contract
from tasks.data.contract import RULES
from tasks.data.lengths import ModelError
from tasks.screen import refusal
from tests.conftest import config_values, make_model
from tests.rows import screen, write_lines

Frames = dict[str, pl.DataFrame]
TEMPLATE = (
    "{% for m in messages %}{% if m.role == 'system' and loop.length > 2 %}{{ raise_exception('no system here') }}"
    "{% endif %}{{ m.content }}{% endfor %}="
)


@pytest.fixture(scope="module")
def chat_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return _with_template(tmp_path_factory.mktemp("chat"), TEMPLATE)


def _with_template(folder: Path, template: str) -> Path:
    make_model(folder)
    (folder / "chat_template.jinja").write_text(template)
    return folder


def _frames() -> Frames:
    def sums(first: int, last: int) -> pl.DataFrame:
        numbers = range(first, last)
        return pl.DataFrame({"prompt": [f"{n}+1=" for n in numbers], "answer": [str(n + 1) for n in numbers]})

    return {"train": sums(10, 20), "eval": sums(30, 35)}


def _messages(*pairs: tuple[str, str | None]) -> list[dict[str, str | None]]:
    return [{"role": role, "content": content} for role, content in pairs]


def _conversations(frames: Frames) -> Frames:
    return {
        name: frame.with_columns(prompt=pl.Series([_messages(("user", p)) for p in frame["prompt"]]))
        for name, frame in frames.items()
    }


def _set(dataset: str, row: int, column: str, value: Any) -> Callable[[Frames], None]:
    def mutate(frames: Frames) -> None:
        rows = frames[dataset].to_dicts()
        rows[row][column] = value
        frames[dataset] = pl.DataFrame(rows, schema_overrides=frames[dataset].schema)

    return mutate


def _config(model: Path, folder: Path, frames: Frames, **checks: str) -> RunConfig:
    for name, frame in frames.items():
        frame.write_parquet(folder / f"{name}.parquet")
    values = config_values(model, folder)
    values["data"]["checks"] = checks
    return parse_config(values)


def test_sound_data_passes_whole(model_folder: Path, tmp_path: Path) -> None:
    screened = screen(_config(model_folder, tmp_path, _frames()))
    assert (screened.refused, screened.shape, screened.findings.height) == (False, [], 0)
    assert {name: frame.to_dicts() for name, frame in screened.kept.items()} == {
        name: frame.to_dicts() for name, frame in _frames().items()
    }


TEXT_FAULTS = [
    ("train", 3, "prompt", None, "blank_prompt"),
    ("train", 3, "prompt", " \n\t", "blank_prompt"),
    ("train", 3, "prompt", "\u200b\ufeff", "blank_prompt"),
    ("train", 3, "prompt", "{'content': '1+1=', 'role': 'user'}", "malformed_conversation"),
    ("train", 4, "prompt", "31+1=\u200b", "near_overlap"),
    ("eval", 2, "prompt", "", "blank_prompt"),
    ("train", 3, "prompt", '[{"role": "user", "content": "1+1="}]', "malformed_conversation"),
    ("train", 3, "prompt", "what is it?", "no_tokens"),
    ("train", 3, "prompt", "10+1=", "duplicate_prompt"),
    ("eval", 3, "prompt", "30+1=", "duplicate_prompt"),
    ("train", 0, "prompt", "1+" * 40 + "1=", "long_prompt"),
    ("train", 4, "prompt", "31+1=", "overlap"),
    ("train", 4, "prompt", "31+1=  ", "near_overlap"),
    ("train", 5, "prompt", "5+\ufffd=", "encoding"),
    ("train", 5, "prompt", "5+\x00=", "encoding"),
    ("train", 5, "prompt", "cafÃ©=", "encoding"),
    ("train", 5, "prompt", "itâ€™s=", "encoding"),
    ("eval", 2, "answer", None, "missing_value"),
    ("eval", 2, "answer", " ", "missing_value"),
]
CHAT_FAULTS = [
    ("train", 3, "prompt", None, "blank_prompt"),
    ("train", 3, "prompt", [], "blank_prompt"),
    ("train", 3, "prompt", _messages(("user", "  ")), "blank_prompt"),
    ("train", 3, "prompt", _messages(("user", "1+1="), ("user", None)), "blank_prompt"),
    ("train", 3, "prompt", _messages(("user", None), ("user", "1+1=")), "malformed_conversation"),
    ("train", 3, "prompt", _messages(("user", '[{"type": "text", "text": "1+1="}]')), "malformed_conversation"),
    ("train", 3, "prompt", _messages(("robot", "x"), ("user", "1+1=")), "malformed_conversation"),
    ("train", 3, "prompt", _messages(("user", "1+1="), ("assistant", "2")), "malformed_conversation"),
    ("train", 3, "prompt", _messages(("user", "1"), ("system", "x"), ("user", "2")), "malformed_conversation"),
    ("train", 3, "prompt", _messages(("system", "x"), ("user", "1"), ("user", "2")), "chat_template"),
    ("train", 3, "prompt", _messages(("user", "1+" * 20), ("user", "1+" * 20)), "long_prompt"),
    ("train", 3, "prompt", _messages(("user", "1+1="), ("user", "what?")), "no_tokens"),
    ("train", 3, "prompt", _messages(("user", "10+1=")), "duplicate_prompt"),
    ("train", 3, "prompt", _messages(("user", "31+1=")), "overlap"),
    ("train", 3, "prompt", _messages(("user", " 31+1=")), "near_overlap"),
    ("train", 3, "prompt", _messages(("system", "\ufffd"), ("user", "1+1=")), "encoding"),
]


@pytest.mark.slow
@pytest.mark.parametrize(("dataset", "row", "column", "value", "rule"), TEXT_FAULTS)
def test_a_single_fault_in_text_is_found_and_placed(
    model_folder: Path, tmp_path: Path, dataset: str, row: int, column: str, value: Any, rule: str
) -> None:
    _expect_one(model_folder, tmp_path, _frames(), (dataset, row, column, value, rule))


@pytest.mark.slow
@pytest.mark.parametrize(("dataset", "row", "column", "value", "rule"), CHAT_FAULTS)
def test_a_single_fault_in_conversations_is_found_and_placed(
    chat_model: Path, tmp_path: Path, dataset: str, row: int, column: str, value: Any, rule: str
) -> None:
    _expect_one(chat_model, tmp_path, _conversations(_frames()), (dataset, row, column, value, rule))


def _expect_one(model: Path, folder: Path, frames: Frames, fault: tuple[str, int, str, Any, str]) -> None:
    """The fault alone is found: it refuses as an error and stays as a warning; dropped, its row is kept beside."""
    dataset, row, column, value, rule = fault
    _set(dataset, row, column, value)(frames)
    screened = screen(_config(model, folder, frames, **{rule: "error"}))
    assert (screened.refused, screened.findings["check"].to_list()) == (True, [rule])
    if "warn" in get_args(DataChecks.model_fields[rule].annotation):
        warned = screen(_config(model, folder, frames, **{rule: "warn"}))
        assert not warned.refused
        assert {name: frame.height for name, frame in warned.kept.items()} == {"train": 10, "eval": 5}
    dropped = screen(_config(model, folder, frames, **{rule: "drop"}))
    assert dropped.findings.select("dataset", "row", "column", "check").rows() == [(dataset, row, column, rule)]
    assert not dropped.refused
    assert dropped.kept[dataset].height == frames[dataset].height - 1
    assert dropped.dropped[dataset]["source_row"].to_list() == [row]
    assert dropped.dropped[dataset].drop("source_row", "broken_rules").to_dicts() == [
        frames[dataset].row(row, named=True)
    ]


def test_prompts_are_compared_with_those_that_stay(model_folder: Path, tmp_path: Path) -> None:
    frames = _frames()
    for mutate in (
        *(_set("train", row, "prompt", "7+7=") for row in (0, 7)),
        _set("train", 0, "answer", None),
        _set("train", 4, "prompt", "31+1="),
        _set("eval", 1, "answer", None),
    ):
        mutate(frames)
    screened = screen(_config(model_folder, tmp_path, frames, missing_value="drop", duplicate_prompt="drop"))
    assert (screened.refused, screened.findings["check"].to_list()) == (False, ["missing_value", "missing_value"])
    assert "7+7=" in screened.kept["train"]["prompt"]


def test_keys_that_only_some_messages_have_are_no_part_of_the_others(tmp_path: Path) -> None:
    template = "{% for m in messages %}{{ m.content }}{% if 'name' in m %}{{ m.name | length }}{% endif %}{% endfor %}"
    frames = _conversations(_frames())
    frames["train"] = frames["train"].with_columns(
        prompt=pl.Series(
            [[{"role": "user", "content": f"{n}+1=", "name": "1" if n == 10 else None}] for n in range(10, 20)]
        )
    )
    screened = screen(_config(_with_template(tmp_path / "named", template), tmp_path, frames))
    assert not screened.refused
    assert sorted(screened.lengths["train"]) == [5] * 9 + [6]


@pytest.mark.slow
@pytest.mark.parametrize("picky", ["10", "17"])
def test_a_template_that_refuses_what_a_prompt_says_breaks_the_rule_in_that_row(tmp_path: Path, picky: str) -> None:
    """Also in the first row of an order of roles, which says nothing of the others."""
    template = (
        "{% for m in messages %}{% if 'PICKY' in m.content %}{{ raise_exception('no') }}{% endif %}"
        "{{ m.content }}{% endfor %}".replace("PICKY", picky)
    )
    model = _with_template(tmp_path / "picky", template)
    frames = _conversations(_frames())
    found = screen(_config(model, tmp_path, frames))
    assert found.refused
    assert found.findings.select("dataset", "row", "check").rows() == [("train", int(picky) - 10, "chat_template")]
    assert screen(_config(model, tmp_path, frames, chat_template="drop")).kept["train"].height == 9


def test_a_failure_while_a_rule_is_held_is_an_error_and_no_row(
    model_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fails(*_: Any) -> Any:
        raise RuntimeError("no room in memory")

    monkeypatch.setattr(contract, "has_tokens", fails)
    with pytest.raises(RuntimeError, match="no room in memory"):
        screen(_config(model_folder, tmp_path, _frames()))


def test_every_rule_has_a_fault_above() -> None:
    faults = {rule for *_, rule in (*TEXT_FAULTS, *CHAT_FAULTS)}
    others = {"own_schema", "broken_image", "too_many_images"}  # test_own_schema.py, test_images.py
    assert faults | others == set(RULES) == set(DataChecks.model_fields)


def _of(dataset: str, change: Callable[[pl.DataFrame], pl.DataFrame]) -> Callable[[Frames], None]:
    return lambda frames: frames.update({dataset: change(frames[dataset])})


@pytest.mark.slow
@pytest.mark.parametrize(
    ("mutate", "sentence"),
    [
        (_of("train", lambda t: t.drop("answer")), "train has no column 'answer', which numeric_match reads"),
        (_of("eval", lambda t: t.drop("prompt")), "eval has no column 'prompt'; its columns are answer"),
        (
            _of("train", lambda t: t.rename({"prompt": "question"}).select("answer", "question")),
            "train has no column 'prompt'; its columns are answer, question: set data.columns.prompt = \"question\"",
        ),
        (_of("eval", lambda t: t.head(0)), "eval has no rows"),
        (_of("eval", lambda t: t.with_columns(prompt=pl.lit(" "))), "eval has no rows left: all 5 were dropped"),
        (_of("train", lambda t: t.with_columns(prompt=pl.lit(5))), "column 'prompt': its type is Int32"),
        (_of("train", lambda t: t.with_columns(answer=pl.lit(None))), "column 'answer': its type is null only"),
        (
            _of("train", lambda t: t.with_columns(answer=pl.concat_list("answer"))),
            "column 'answer': its type is List(String); the reward numeric_match takes str | int | float",
        ),
        (_of("eval", lambda t: _conversations({"it": t})["it"]), "prompts of train are text, those of eval conversat"),
        (lambda f: f.update(_conversations(f)), "has no chat template"),
        (
            _of("train", lambda t: t.with_columns(prompt=pl.concat_list(pl.struct(role=pl.lit("user"))))),
            "a prompt is text, or a list of messages",
        ),
    ],
)
def test_columns_of_the_wrong_shape_are_named(
    model_folder: Path, tmp_path: Path, mutate: Callable[[Frames], None], sentence: str
) -> None:
    frames = _frames()
    mutate(frames)
    screened = screen(_config(model_folder, tmp_path, frames, blank_prompt="drop"))
    assert screened.refused
    assert sentence in "\n".join(screened.shape)


@pytest.mark.slow
@pytest.mark.parametrize("severity", ["error", "drop"])
@pytest.mark.parametrize("conversations", [False, True])
def test_a_giant_prompt_is_too_long_and_not_tokenized(
    model_folder: Path,
    chat_model: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    severity: str,
    conversations: bool,
) -> None:
    """Two giants: digits, and letters that the tokenizer leaves out. Row 0 is also searched for end tokens."""
    frames = _conversations(_frames()) if conversations else _frames()
    for row, text in ((0, "1" * 1_100_000), (7, "x " * 550_000)):
        _set("train", row, "prompt", _messages(("user", text)) if conversations else text)(frames)
    tokenized: list[int] = []
    encode = PreTrainedTokenizerFast._encode_plus

    def watched(self: Any, text: Any, *arguments: Any, **options: Any) -> Any:
        tokenized.extend(map(len, [text] if isinstance(text, str) else text))
        return encode(self, text, *arguments, **options)

    monkeypatch.setattr(PreTrainedTokenizerFast, "_encode_plus", watched)
    config = _config(chat_model if conversations else model_folder, tmp_path, frames, long_prompt=severity)
    screened = screen(config)
    assert screened.findings.select("row", "check").rows() == [(0, "long_prompt"), (7, "long_prompt")]
    assert screened.refused == (severity == "error")
    assert tokenized
    assert max(tokenized) < 1000


@pytest.mark.slow
def test_integers_that_cannot_be_stored_are_named_where_they_are_read(model_folder: Path, tmp_path: Path) -> None:
    values = _config(model_folder, tmp_path, _frames()).model_dump(mode="json")
    values["data"]["train"] = str(tmp_path / "train.jsonl")
    rows = [{"prompt": f"{n}+1=", "answer": 10**25 + n, "id": 2**64 - n} for n in range(10, 20)]
    write_lines(tmp_path / "train.jsonl", rows)
    assert screen(parse_config(values)).shape == [
        "train, column 'answer', which numeric_match reads, has integers beyond 64 bits, or objects without fields, "
        "which cannot be stored: write them as text"
    ]
    write_lines(tmp_path / "train.jsonl", [row | {"answer": 5} for row in rows])
    assert screen(parse_config(values)).kept["train"].columns == ["prompt", "answer"]


def test_prompts_are_read_from_the_column_that_is_named(model_folder: Path, tmp_path: Path) -> None:
    frames = _frames()
    frames["hard"] = pl.DataFrame({"prompt": ["40+1="], "answer": ["41"]})
    frames = {name: frame.rename({"prompt": "problem"}) for name, frame in frames.items()}
    values = _config(model_folder, tmp_path, frames).model_dump(mode="json")
    values["evaluation"]["sets"] = [{"name": "hard", "data": str(tmp_path / "hard.parquet")}]
    values["data"]["columns"] = {"prompt": "problem"}
    screened = screen(parse_config(values))
    assert not screened.refused
    for name, frame in screened.kept.items():
        assert frame["prompt"].to_list() == frames[name.removeprefix("eval-")]["problem"].to_list()
    values["data"]["columns"] = {"prompt": "problm"}
    problems = screen(parse_config(values)).shape
    assert problems[0].startswith("train has no column 'problm' (for data.columns.prompt = 'problm'); its columns are ")
    assert all(problem.endswith(': set data.columns.prompt = "problem"') for problem in problems)
    assert len(problems) == 3


def test_a_row_s_schema_that_only_a_completion_would_tell_of_is_refused(model_folder: Path, tmp_path: Path) -> None:
    schemas = ['{"type": "object"}'] * 8 + [None, '{"$id": "http://x/y", "properties": {"a": {"$ref": "#/nope"}}}']
    frames = _frames()
    frames["train"] = frames["train"].with_columns(schema=pl.Series(schemas))
    frames["eval"] = frames["eval"].with_columns(schema=pl.lit("{}"))
    values = _config(model_folder, tmp_path, frames).model_dump(mode="json")
    values["rewards"] = [{"function": "json_schema"}]
    (sentence,) = screen(parse_config(values)).shape
    assert sentence.startswith("train row 9, column 'schema', which json_schema reads: no JSON Schema")
    assert sentence.endswith("its reference '#/nope' leads nowhere")


def test_a_completion_as_long_as_the_context_is_refused(model_folder: Path, tmp_path: Path) -> None:
    _config(model_folder, tmp_path, _frames())
    with pytest.raises(ModelError, match=r"completions of 64 tokens \(train\) leave no room .* takes 64 tokens"):
        screen(parse_config(config_values(model_folder, tmp_path, max_completion_length=64)))


def test_wrong_columns_are_named_before_the_model_is_loaded(tmp_path: Path) -> None:
    frames = _frames()
    frames["train"] = frames["train"].rename({"prompt": "question"})
    screened = screen(_config(tmp_path / "no-model", tmp_path, frames))
    (sentence,) = screened.shape
    assert sentence.startswith("train has no column 'prompt'; its columns are question, answer")
    assert refusal(screened).endswith(sentence)
    with pytest.raises(ModelError):
        screen(_config(tmp_path / "no-model", tmp_path, _frames()))


def test_a_tokenizer_that_ends_prompts_is_refused(tmp_path: Path) -> None:
    folder = make_model(tmp_path / "model")
    tokenizer = AutoTokenizer.from_pretrained(folder)
    end, end_id = tokenizer.eos_token, tokenizer.eos_token_id
    tokenizer.backend_tokenizer.post_processor = TemplateProcessing(f"$A {end}", special_tokens=[(end, end_id)])
    tokenizer.save_pretrained(folder)
    screened = screen(_config(folder, tmp_path, _frames()))
    assert screened.refused
    assert ["puts its end token" in problem for problem in screened.shape] == [True]


def test_prompts_that_rope_frequencies_would_change_with_are_too_long(tmp_path: Path) -> None:
    rope = {"rope_type": "longrope", "rope_theta": 1e4, "short_factor": [1.0] * 16, "long_factor": [4.0] * 16}
    folder = make_model(tmp_path / "model", "Phi3", original_max_position_embeddings=11, rope_parameters=rope)
    frames = _frames()
    _set("train", 2, "prompt", "112+1=")(frames)
    screened = screen(_config(folder, tmp_path, frames))  # 5 or 6 tokens and a completion of 6
    assert screened.findings.select("row", "check").rows() == [(2, "long_prompt")]


def test_held_out_prompts_leave_room_for_the_evaluation_s_completions(model_folder: Path, tmp_path: Path) -> None:
    values = config_values(model_folder, tmp_path)
    _config(model_folder, tmp_path, _frames())
    values["evaluation"] = {"max_completion_length": 60}
    screened = screen(parse_config(values))
    assert set(screened.findings["dataset"]) == {"eval"}
    assert set(screened.findings["check"]) == {"long_prompt"}


@pytest.mark.slow
@pytest.mark.parametrize("severity", ["error", "drop"])
def test_a_further_evaluation_set_is_held_against_the_same_rules_and_changes_nothing_that_is_trained_on(
    model_folder: Path, tmp_path: Path, severity: str
) -> None:
    frames = _frames()
    hard = [("14+1=", "15"), (" 15+1=", "16"), ("40+1=", "41"), (" ", "1"), ("41+1=", None), ("30+1=", "31")]
    frames["hard"] = pl.DataFrame(hard, ["prompt", "answer"], orient="row")
    rules = ("overlap", "near_overlap", "blank_prompt", "missing_value")
    values = _config(model_folder, tmp_path, frames, **dict.fromkeys(rules, severity)).model_dump(mode="json")
    without = screen(parse_config(values))
    values["evaluation"]["sets"] = [{"name": "hard", "data": str(tmp_path / "hard.parquet")}]
    screened = screen(parse_config(values))
    found = {(row, check) for _, row, _, check, *_ in screened.findings.filter(dataset="eval-hard").rows()}
    assert found == {(0, "overlap"), (1, "near_overlap"), (3, "blank_prompt"), (4, "missing_value")}
    assert screened.findings.height == len(found)
    assert "14+1= (train row 4)" in screened.findings["value"].to_list()
    assert screened.refused == (severity == "error")
    assert screened.kept["eval-hard"]["prompt"].to_list() == ["40+1=", "30+1="]
    for name in ("train", "eval"):
        assert screened.kept[name].equals(without.kept[name])
    assert screened.report["parts"]["eval-hard"]["source"] == str(tmp_path / "hard.parquet")
