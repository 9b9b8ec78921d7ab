"""The columns that a run needs are made from those that a data set has."""

from __future__ import annotations

import json
import string
import sys
from pathlib import Path
from typing import Any

import polars as pl
import pytest
from hypothesis import given
from hypothesis import strategies as st

from grpo_core.config.files import load_config, parse_config
from grpo_core.config.inputs import DataConfig
from grpo_core.config.run import RunConfig
from grpo_core.data.own_code import check
from grpo_core.errors import ConfigError
from tasks.data import columns as made_columns
from tasks.data.column_fixes import missing_column
from tasks.data.columns import SLICE, ColumnError
from tasks.data.rows import of_frame
from tasks.data.sources import SourceError
from tasks.stages.lineage import lineage_keys
from tasks.stages.run_directory import open_run
from tests.conftest import config_values, write_sums
from tests.formats import CONVERSATIONS, GSM8K, MBPP, MESSAGES, TLDR
from tests.rows import screen, whole, write_lines
from tests.tasks.test_own_rewards import _project as project

TEXT = st.text(st.characters(exclude_categories=["Cs"]), max_size=5)
PART = st.one_of(TEXT.map(lambda text: text.replace("{", "{{").replace("}", "}}")), st.sampled_from(["{a}", "{b c}"]))


def with_columns(frame: pl.DataFrame, config: DataConfig) -> pl.DataFrame:
    return whole(made_columns.with_columns(of_frame(frame), config))


def _data(**keys: Any) -> DataConfig:
    return DataConfig(train="", eval="", **keys)


@pytest.mark.slow
@given(st.lists(PART, max_size=5), st.lists(st.tuples(TEXT, st.integers(-5, 5)), min_size=1, max_size=4))
def test_a_template_is_filled_in_as_python_would(parts: list[str], values: list[tuple[str, int]]) -> None:
    template = "".join(["{a}", *parts])
    rows = [{"a": text, "b c": number} for text, number in values]
    made = with_columns(pl.DataFrame(rows), _data(columns={"prompt": template}))
    expected = [string.Formatter().vformat(template, (), row) for row in rows]
    assert made["prompt"].to_list() == expected
    assert made.select("a", "b c").to_dicts() == rows


def test_columns_are_made_of_what_the_data_set_has_and_not_of_each_other() -> None:
    frame = pl.DataFrame({"question": ["1+1="], "prompt": ["an old one"], "answer": [2], "tests": [["a", "b"]]})
    columns = {"prompt": "question", "question": "prompt", "answer": "{answer}", "all": "{prompt}:\n{tests}"}
    assert with_columns(frame, _data(columns=columns)).to_dicts() == [
        {"question": "an old one", "prompt": "1+1=", "answer": "2", "tests": ["a", "b"], "all": "an old one:\na\nb"}
    ]


def test_a_template_writes_whole_numbers_without_a_point_and_reads_fields_of_objects() -> None:
    rows = [{"n": 8.0, "reward_model": {"ground_truth": "8", "style": {"kind": "rule"}}, "a.b": 1}]
    columns = {"prompt": "{n}", "answer": "reward_model.ground_truth", "all": "{reward_model.style.kind} {a.b}"}
    made = with_columns(pl.DataFrame(rows), _data(columns=columns))
    assert made.select(*columns).to_dicts() == [{"prompt": "8", "answer": "8", "all": "rule 1"}]
    assert "answer" not in with_columns(pl.DataFrame(rows), _data(columns={"answer": "reward_model.truth"})).columns


def test_a_gap_stays_a_gap_and_what_cannot_be_made_is_left_out() -> None:
    frame = pl.DataFrame({"question": ["1+1=", None], "prompt": ["old", "old"]})
    assert with_columns(frame, _data(columns={"prompt": "Q: {question}"}))["prompt"].to_list() == ["Q: 1+1=", None]
    assert "prompt" not in with_columns(frame, _data(columns={"prompt": "problem"})).columns


@pytest.mark.parametrize("template", ["{", "}", "{}", "{a!r}", "{a:>3}", "", "{{}}"])
def test_a_template_that_names_no_column_is_refused(template: str) -> None:
    values = config_values(Path("model"), Path())
    values["data"]["columns"] = {"prompt": template}
    with pytest.raises(ConfigError, match=r"data\.columns: prompt = '"):
        parse_config(values)


def test_bytes_that_are_no_utf8_are_found_by_the_rule_encoding(tmp_path: Path, model_folder: Path) -> None:
    """In a prompt that a template makes of bytes, as the check itself advises, and in an answer that a reward reads."""
    rows = {"prompt": [b"1+1=", b"1+\xff="], "answer": ["2", "2\ufffd"], "note": ["\ufffd", "\ufffd"]}
    for name in ("train", "eval"):
        pl.DataFrame(rows if name == "train" else {"prompt": [b"2+2="], "answer": ["4"]}).write_parquet(
            tmp_path / f"{name}.parquet"
        )
    values = config_values(model_folder, tmp_path)
    assert 'data.columns.prompt = "{prompt}" writes it as text' in "".join(screen(parse_config(values)).shape)
    values["data"]["columns"] = {"prompt": "{prompt}"}
    found = screen(parse_config(values)).findings
    assert found.select("row", "column", "check").rows() == [(1, "prompt", "encoding"), (1, "answer", "encoding")]


def test_a_column_made_of_one_that_is_not_there_is_still_named_among_the_data_set_s_own(
    tmp_path: Path, model_folder: Path
) -> None:
    values = config_values(model_folder, tmp_path)
    for name in ("train", "eval"):
        write_sums(tmp_path / f"{name}.parquet", 10, 12)
    values["data"]["columns"] = {"answer": "solution"}
    assert screen(parse_config(values)).shape[0] == (
        "train has no column 'solution' (for data.columns.answer = 'solution'), which numeric_match reads; its columns "
        "are prompt, answer: leave data.columns.answer out, or set it to what the column should be made from"
    )


SYSTEM = {"role": "system", "content": "Be brief."}
ASKED = {"role": "user", "content": "Hi"}
CALLING = {"role": "assistant", "content": None, "tool_calls": [{"function": {"name": "add"}}]}


@pytest.mark.parametrize(
    ("prompts", "expected"),
    [
        (["Hi", None], [[SYSTEM, ASKED], None]),
        ([[ASKED], None, []], [[SYSTEM, ASKED], None, []]),
        ([[SYSTEM | {"content": "Its own."}, ASKED]], [[SYSTEM | {"content": "Its own."}, ASKED]]),
        (
            [[ASKED | {"tool_calls": None}, CALLING]],
            [[SYSTEM | {"tool_calls": None}, ASKED | {"tool_calls": None}, CALLING]],
        ),
    ],
)
def test_the_system_prompt_comes_before_prompts_that_have_none(prompts: list[Any], expected: list[Any]) -> None:
    made = with_columns(pl.DataFrame({"prompt": prompts}), _data(system_prompt="Be brief."))
    assert made["prompt"].to_list() == expected


def test_an_empty_system_prompt_makes_messages_of_text_and_leaves_messages() -> None:
    made = with_columns(pl.DataFrame({"prompt": ["Hi"]}), _data(system_prompt=""))
    assert made["prompt"].to_list() == [[ASKED]]
    assert with_columns(made, _data(system_prompt="")).equals(made)


@pytest.fixture
def module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.syspath_prepend(tmp_path)
    (tmp_path / "own_columns.py").write_text(
        "def asked(row): return [{'role': 'user', 'content': row['question']}]\n"
        "def number(row): return row['answer'].rpartition('#### ')[2] if row['answer'] else None\n"
        "def mixed(row): return [1, 'a', None][row['n'] % 3] if row['n'] < 5 else {}\n"
        "def growing(row): return [{'role': 'user', **({'name': 'b'} if row['answer'] else {})}]\n"
        "def broken(row): return 1 / (row['n'] - 3)\n"
        "value = 5\n"
    )
    monkeypatch.delitem(sys.modules, "own_columns", raising=False)
    return tmp_path / "own_columns.py"


def test_a_function_of_one_s_own_is_given_each_row(module: Path) -> None:
    frame = pl.DataFrame({"question": ["a"] * (SLICE + 2), "answer": [None] * SLICE + ["b #### 1,000", None]})
    columns = {"prompt": "own_columns:asked", "answer": "own_columns:number"}
    made = with_columns(frame, _data(columns=columns))
    assert made["prompt"].to_list() == [[{"role": "user", "content": "a"}]] * (SLICE + 2)
    growing = with_columns(frame.with_row_index("n"), _data(columns={"prompt": "own_columns:growing"}))["prompt"]
    assert growing[0].to_list() == [{"role": "user", "name": None}] and growing[-2].to_list() == [
        {"role": "user", "name": "b"}
    ]
    assert made["answer"].to_list() == [None] * SLICE + ["1,000", None]


@pytest.mark.parametrize(
    ("how", "sentence"),
    [
        ("own_columns:broken", "data.columns.answer = 'own_columns:broken' fails at row 3: ZeroDivisionError"),
        ("own_columns:mixed", "'own_columns:mixed' returns a value that no column can hold, in rows 0 to 8"),
        ("own_columns:value", "'own_columns:value' is a int, not a function"),
        ("{turn}", "data.columns.answer = '{turn}': the column 'turn' holds Struct"),
    ],
)
def test_what_makes_no_column_is_named_with_its_row(module: Path, how: str, sentence: str) -> None:
    rows = [{"n": n, "turn": {"role": "user"}} for n in range(9)]
    with pytest.raises(ConfigError if "value" in how else ColumnError) as refused:
        with_columns(pl.DataFrame(rows), _data(columns={"answer": how}))
    assert sentence in str(refused.value)


@pytest.mark.parametrize(
    ("name", "sentence"),
    [
        ("own_columns:nmber", "own_columns.py does not define 'nmber'"),
        ("own_colums:number", "there is no module 'own_colums'; put own_colums.py into the working folder or beside"),
    ],
)
def test_a_missing_function_is_refused_by_a_plan_too(module: Path, name: str, sentence: str) -> None:
    config = _data(columns={"answer": name})
    for refuse in (lambda: check(config), lambda: with_columns(pl.DataFrame({"n": [1]}), config)):
        with pytest.raises(ConfigError) as refused:
            refuse()
        assert str(refused.value).startswith(f"data.columns.answer = {name!r} cannot be imported: ")
        assert sentence in str(refused.value)


def test_the_check_of_a_plan_for_another_machine_does_not_run_the_module(module: Path) -> None:
    module.write_text(module.read_text() + "raise SystemExit('was run')\n")
    check(_data(columns={"answer": "own_columns:number"}))
    assert "own_columns" not in sys.modules


def test_lineage_follows_the_mapping_and_the_source_of_its_functions(tmp_path: Path, module: Path) -> None:
    def key(**columns: str) -> str:
        values = config_values(tmp_path, tmp_path)
        values["data"]["columns"] = columns
        return lineage_keys(parse_config(values))["validate"]

    (tmp_path / "train.parquet").touch()
    keys = [key(), key(answer="solution"), key(answer="{solution}"), key(answer="own_columns:number")]
    module.write_text(module.read_text().replace("#### ", "###"))
    keys.append(key(answer="own_columns:number"))
    assert len({*keys}) == len(keys)


def test_a_run_keeps_the_module_of_its_columns(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GRPO_STORAGE", str(tmp_path / "storage"))
    config = project(tmp_path / "project", "rewards_of_mine", "def shorter(completions): ...\n")
    (tmp_path / "project" / "columns_of_mine.py").write_text("def asked(row): return row['prompt']\n")
    columns = 'data.columns={prompt = "columns_of_mine:asked"}'
    with open_run(load_config(config, [columns])) as run:
        kept = run / "rewards" / "columns_of_mine.py"
        assert kept.read_text() == "def asked(row): return row['prompt']\n"


OF_CHAT_EXPORT = {
    'set data.columns.prompt = "grpo_core.data.chat_exports:asked"',
    'set data.columns.reference = "grpo_core.data.chat_exports:answered"',
}
CHAT = [
    {
        "id": f"c{n}",
        "messages": [{"role": "system", "content": "Be kind."}, {"role": "user", "content": f"Say {n}"}],
        "expected": f"{n}",
    }
    for n in range(12)
]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("rows", "data", "reward", "prompt", "column"),
    [
        (
            GSM8K,
            {"columns": {"prompt": "question"}, "system_prompt": "Think, then answer."},
            "math_answer",
            [{"role": "system", "content": "Think, then answer."}, {"role": "user", "content": GSM8K[0]["question"]}],
            ("answer", GSM8K[0]["answer"]),
        ),
        (
            GSM8K,
            {"columns": {"prompt": "Question: {question}\nAnswer:", "answer": "own_columns:number"}},
            "numeric_match",
            f"Question: {GSM8K[0]['question']}\nAnswer:",
            ("answer", "2"),
        ),
        (
            MBPP,
            {"columns": {"prompt": "{text}\nYour code should pass:\n{test_list}", "tests": "test_list"}},
            "unit_tests",
            "Write a function to add 0 to a number.\nYour code should pass:\nassert add(1) == 1\nassert add(0) == 0",
            ("tests", MBPP[0]["test_list"]),
        ),
        (
            TLDR,
            {"columns": {"reference": "completion", "answer": "completion"}},
            "rouge",
            TLDR[0]["prompt"],
            ("reference", TLDR[0]["completion"]),
        ),
        (
            CHAT,
            {"columns": {"prompt": "messages", "answer": "expected"}, "system_prompt": "Never used."},
            "exact_match",
            CHAT[0]["messages"],
            ("answer", "0"),
        ),
    ],
    ids=["GSM8K", "GSM8K with a function", "MBPP", "TL;DR", "chat"],
)
def test_published_formats_are_read_as_they_are(
    tmp_path: Path,
    words_model: Path,
    module: Path,
    rows: list[dict[str, Any]],
    data: dict[str, Any],
    reward: str,
    prompt: Any,
    column: tuple[str, Any],
) -> None:
    config = _config(tmp_path, words_model, rows, data, reward)
    screened = screen(config)
    assert not screened.refused, (screened.shape, screened.report["findings"])
    first = screened.kept["train"].row(0, named=True)
    assert (first["prompt"], first[column[0]]) == (prompt, column[1])


@pytest.mark.slow
@pytest.mark.parametrize(
    ("rows", "reward", "sentences"),
    [
        (GSM8K, "math_answer", {'set data.columns.prompt = "question"'}),
        (
            [{"problem": row["question"], "solution": row["answer"]} for row in GSM8K],
            "math_answer",
            {'set data.columns.prompt = "problem"', 'set data.columns.answer = "solution"'},
        ),
        (MBPP, "unit_tests", {'set data.columns.prompt = "text"', 'set data.columns.tests = "test_list"'}),
        (TLDR, "rouge", {'set data.columns.reference = "completion"'}),
        (CHAT, "exact_match", {'set data.columns.prompt = "messages"', 'set data.columns.answer = "expected"'}),
        (
            [{"prompt": r["question"], "reward_model": {"ground_truth": r["answer"], "style": "rule"}} for r in GSM8K],
            "math_answer",
            {'set data.columns.answer = "reward_model.ground_truth"'},
        ),
        *((rows, "rouge", OF_CHAT_EXPORT) for rows in (MESSAGES, CONVERSATIONS)),
        (
            [{"prompt": f"{n}+1=", "reference": n + 1} for n in range(12)],
            "rouge",
            {'data.columns.reference = "{reference}" writes it as text'},
        ),
    ],
    ids=["GSM8K", "MATH", "MBPP", "TL;DR", "chat", "verl", "export", "ShareGPT", "number"],
)
def test_a_refusal_names_the_key_that_mends_it(
    tmp_path: Path, words_model: Path, rows: list[dict[str, Any]], reward: str, sentences: set[str]
) -> None:
    """Each is set then as it says, and the columns are accepted."""
    problems = screen(_config(tmp_path, words_model, rows, {}, reward)).shape
    assert {problem.rpartition(": ")[2] for problem in problems} == sentences
    keys = [sentence.removeprefix("set ").removesuffix(" writes it as text") for sentence in sentences]
    data: dict[str, Any] = {"columns": {}}
    for key in keys:
        name, _, how = key.removeprefix("data.columns.").partition(" = ")
        data["columns"][name] = json.loads(how)
    assert not screen(_config(tmp_path, words_model, rows, data, reward)).shape


@pytest.mark.parametrize("name", ["answer", "expected_output", "Label", "gold-answer", "targets"])
def test_a_column_of_answers_is_not_offered_as_the_prompt(name: str) -> None:
    said = missing_column("prompt", "", pl.DataFrame({name: ["2"]}), {}, {})
    assert said.endswith(f"its columns are {name}: set data.columns.prompt to what it should be made from")
    assert missing_column("prompt", "", pl.DataFrame({name: ["2"], "asked": ["1+1"]}), {}, {}).endswith('= "asked"')


def test_a_reward_that_wants_the_column_completion_is_told_the_name_of_what_the_model_writes() -> None:
    said = missing_column("completion", ", which mine reads", pl.DataFrame({"prompt": ["2"]}), {}, {"completion": {}})
    assert said.endswith("made from; a reward gets what the model writes as 'completions'")


def test_a_column_that_no_reward_reads_is_refused_only_if_no_data_set_has_its_parts(
    tmp_path: Path, words_model: Path
) -> None:
    rows = [{"prompt": f"{n}+1=", "topic": "sums"} for n in range(12)]
    for how in ("topic", "{topic}!"):
        data = {"columns": {"category": how}}
        assert not screen(_config(tmp_path, words_model, [*rows[:8], *({"prompt": "x"}, {"prompt": "y"})], data)).shape
    assert screen(_config(tmp_path, words_model, rows, {"columns": {"category": "topics"}})).shape == [
        "no data set has the parts of data.columns.category: train has no column 'topics' (for data.columns.category = "
        "'topics'); its columns are prompt, topic: set data.columns.category = \"topic\""
    ]


def test_a_source_whose_column_cannot_be_made_is_named(tmp_path: Path, words_model: Path, module: Path) -> None:
    rows = [{"n": n} for n in range(9)]
    config = _config(tmp_path, words_model, rows, {"columns": {"prompt": "own_columns:broken"}}, "length")
    with pytest.raises(SourceError, match=r"data\.train = '.*train\.jsonl': data\.columns\.prompt = 'own_columns:brok"):
        screen(config)


def _config(
    folder: Path, model: Path, rows: list[dict[str, Any]], data: dict[str, Any], reward: str = "length"
) -> RunConfig:
    """Trains on the first rows and evaluates on the last."""
    for name, part in (("train", rows[:8]), ("eval", rows[8:])):
        write_lines(folder / f"{name}.jsonl", part)
    values = config_values(model, folder)
    values["data"] = {"train": str(folder / "train.jsonl"), "eval": str(folder / "eval.jsonl"), **data}
    values["rewards"] = [{"function": reward, **({"args": {"target": 3}} if reward == "length" else {})}]
    return parse_config(values)
