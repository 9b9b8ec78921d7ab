"""Rollouts are chosen as asked, and what they contain is shown as text, in the terminal and on the page, where tokens
are coloured by what was recorded of them."""

from __future__ import annotations

import json
import math
import random
import re
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import AutoModelForCausalLM, PreTrainedTokenizerFast
from typer.testing import CliRunner, Result

from flows.cli.main import app
from grpo_core.config.files import dump_config, parse_config
from tasks.data.completions import NoRolloutsError
from tasks.rendering.visible import UNSHOWN, shortened, visible
from tasks.reports.rollouts import choose_rollouts, rollouts_page, with_trained_policy
from tasks.reports.tokens import LEVELS, LIMITS, MOST_TOKENS, coloured_pieces
from tests.hostile import EVIL
from tests.made_up import sampled, values_of, write_sampled
from tests.pages import Page

G = 4
REWARDS = [{"function": "numeric_match"}, {"function": "length", "weight": 0.5, "args": {"target": 3}}]


def _write_run(folder: Path, batches: list[list[dict[str, Any]]], training: str = "training") -> Path:
    folder.mkdir(parents=True)
    values = {**values_of(folder.name), "rewards": REWARDS}
    (folder / "config.toml").write_text(dump_config(parse_config(values)))
    write_sampled(folder / training, batches, G)
    return folder


def _drawn_batches() -> list[list[dict[str, Any]]]:
    """Six batches of four prompts, of which some come back; each reward may have left a completion unscored."""
    draw = random.Random(0)
    batches = []
    for step in range(1, 7):
        rows = []
        for row in draw.sample(range(9), 4):
            for member in range(G):
                first, second = (draw.choice([None, 0.0, 1.0]), draw.choice([None, -0.25, 0.75]))
                said = {"completion": draw.choice(["Seven", "eight", "sevenTEEN"]) + f" {member}"}
                ids = list(range(draw.randrange(1, 6)))
                advantage = {"advantage": draw.choice([-1.0, 0.5, math.nan]), "truncated": draw.random() < 0.3}
                rows.append(
                    sampled(step, row, {"numeric_match": first, "length": second}, completion_ids=ids)
                    | said
                    | advantage
                )
        batches.append(rows)
    return batches


BATCHES = _drawn_batches()


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return _write_run(tmp_path_factory.mktemp("storage") / "runs" / "drawn", BATCHES)


def _plain(order: str, reward: str | None, steps: tuple[int, int], text: str, row: int | None) -> list[dict[str, Any]]:
    """What `choose_rollouts` should find, in its order, by a sort of Python's."""

    def value(it: dict[str, Any]) -> float | None:
        parts = {name: it[f"rewards/{name}"] for name in ("numeric_match", "length")}
        if reward:
            return parts[reward]
        weighted = [
            weight * parts[name]
            for name, weight in (("numeric_match", 1.0), ("length", 0.5))
            if parts[name] is not None
        ]
        return sum(weighted) if weighted else None

    def last_if_none(number: float | None, sign: int) -> tuple[bool, float]:
        missing = number is None or math.isnan(number)
        return missing, 0.0 if missing else sign * number

    found = [(batch, place, it) for batch, rows in enumerate(BATCHES) for place, it in enumerate(rows)]
    found = [
        (batch, place, it)
        for batch, place, it in found
        if steps[0] <= it["step"] <= steps[1]
        and (row is None or it["row"] == row)
        and (text.lower() in it["prompt"].lower() or text.lower() in it["completion"].lower())
    ]
    keys = {
        "worst": lambda b, p, it: (last_if_none(value(it), 1), last_if_none(it["advantage"], 1), -b, p),
        "best": lambda b, p, it: (last_if_none(value(it), -1), last_if_none(it["advantage"], -1), -b, p),
        "longest": lambda b, p, it: (-it["completion_tokens"], -b, p),
        "step": lambda b, p, it: (b, p),
    }
    return [it for *_, it in sorted(found, key=lambda entry: keys[order](*entry))]


@pytest.mark.slow
@settings(max_examples=60)
@given(
    order=st.sampled_from(["worst", "best", "longest", "step"]),
    reward=st.sampled_from([None, "numeric_match", "length"]),
    steps=st.sampled_from([None, "2", "2-4"]),
    text=st.sampled_from(["", "seven", "EEN", "3+1="]),
    row=st.sampled_from([None, 0, 3]),
    limit=st.sampled_from([1, 7, 1000]),
)
def test_the_rollouts_are_those_of_a_plain_sort(
    run: Path, order: Any, reward: str | None, steps: str | None, text: str, row: int | None, limit: int
) -> None:
    between = {None: (1, 6), "2": (2, 2), "2-4": (2, 4)}[steps]
    expected = _plain(order, reward, between, text, row)
    if not expected:
        with pytest.raises(NoRolloutsError, match="none of the 96 rollouts, of updates 1 to 6, matches"):
            choose_rollouts(run, order, limit, reward, steps, text, None if row is None else str(row))
        return
    found = choose_rollouts(run, order, limit, reward, steps, text, None if row is None else str(row))
    assert found.figures.height == len(expected)
    shown = [{name: it[name] for name in expected[0]} for it in found.rows]
    assert repr(shown) == repr(expected[:limit])  # NaN differs from itself


@pytest.mark.slow
def test_one_prompt_is_followed_by_its_row_or_by_its_text(run: Path) -> None:
    by_row, by_text = (choose_rollouts(run, "step", 1000, prompt=it) for it in ("3", "3+1="))
    assert by_row.rows == by_text.rows or repr(by_row.rows) == repr(by_text.rows)
    page = Page(rollouts_page(by_row))
    steps = sorted({it["step"] for it in by_row.rows})
    assert f"Sampled for {len(steps)} updates, {len(by_row.rows)} completions" in page.text
    with pytest.raises(NoRolloutsError, match=r"9 prompts contain it; name one by its row: 0 \('0\+1='\)"):
        choose_rollouts(run, prompt="+1=")
    with pytest.raises(NoRolloutsError, match=r"none of the 9 prompts"):
        choose_rollouts(run, prompt="what else")


def _invoke(storage: Path, *arguments: str) -> Result:
    environment = {"GRPO_STORAGE": str(storage), "COLUMNS": "100"}
    return CliRunner().invoke(app, ["rollouts", *arguments], env=environment)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("arguments", "reason"),
    [
        (["--colour", "ratio"], "has no trained policy yet"),
        (["--colour", "hope"], "give one of advantage, surprise, age, ratio, entropy"),
        (["--colour", "age"], "not recorded in this run, which has advantage, surprise"),
        (["--order", "nicest"], "give one of worst, best, longest, step"),
        (["--reward", "charm"], "its rewards: numeric_match, length"),
        (["--step", "7-3"], "give an update such as 40, or a first and a last one such as 40-60"),
    ],
)
def test_what_a_run_does_not_have_is_refused_with_what_it_has(run: Path, arguments: list[str], reason: str) -> None:
    done = _invoke(run.parents[1], "drawn", *arguments)
    assert done.exit_code == 2
    assert reason in done.stderr


def test_a_training_under_way_is_read_and_one_that_sampled_nothing_is_named(tmp_path: Path) -> None:
    _write_run(tmp_path / "runs" / "going", BATCHES[:1], "training.partial")
    _write_run(tmp_path / "runs" / "begun", [])
    assert "rollouts, worst first" in _invoke(tmp_path, "going").output
    begun = _invoke(tmp_path, "begun")
    assert (begun.exit_code, "has sampled nothing yet" in begun.stderr) == (2, True)
    file = tmp_path / "runs" / "going" / "training.partial" / "completions" / "rollout-000000.parquet"
    file.write_bytes(b"PAR1")
    damaged = _invoke(tmp_path, "going")
    assert (damaged.exit_code, f"{file.name} cannot be read" in damaged.stderr) == (2, True)


@pytest.mark.slow
def test_ratio_and_entropy_are_those_of_the_saved_policy_at_the_temperature_of_sampling(
    model_folder: Path, tmp_path: Path
) -> None:
    batch = [sampled(1, 0, {"numeric_match": 1.0, "length": 0.0}, completion_ids=[7, 8, 9 + it]) for it in range(G)]
    folder = tmp_path / "runs" / "done"
    folder.mkdir(parents=True)
    values = values_of("done", model={"name_or_path": str(model_folder)}, rollout={"temperature": 0.7})
    (folder / "config.toml").write_text(dump_config(parse_config({**values, "rewards": REWARDS})))
    write_sampled(folder / "training", [batch], G)
    shutil.copytree(model_folder, folder / "training" / "model")
    found = with_trained_policy(folder, choose_rollouts(folder))
    model = AutoModelForCausalLM.from_pretrained(model_folder).eval()
    for row in found.rows:
        ids = torch.tensor([[*row["prompt_ids"], *row["completion_ids"]]])
        with torch.no_grad():
            plain = (model(ids).logits[0, len(row["prompt_ids"]) - 1 : -1] / 0.7).log_softmax(-1)
        assert row["trained_logprobs"] == pytest.approx(
            [plain[at, it].item() for at, it in enumerate(ids[0, 3:])], abs=1e-5
        )
        assert row["entropies"] == pytest.approx((-plain.exp() * plain).sum(-1).tolist(), abs=1e-5)
    for colour in ("ratio", "entropy"):
        printed = _invoke(tmp_path, "done", "--colour", colour)
        assert printed.exit_code == 0 and f"Colour: {colour}" in printed.output, printed.output
    html = tmp_path / "page.html"
    assert _invoke(tmp_path, "done", "--colour", "ratio", "--html", str(html)).exit_code == 0
    shades = {it for _, tag in Page(html.read_text()).tags for it in (tag.get("class") or "").split()}
    assert any(it.startswith("ratio-") for it in shades) and any(it.startswith("entropy-") for it in shades)


def _hostile_run(folder: Path, text: str) -> Path:
    """The text in a prompt, in a message, in a completion and in each place of a conversation."""
    given = {"numeric_match": 0.0, "length": None}
    plain = [sampled(1, row, given, prompt=text + str(row), completion=text) for row in range(2) for _ in range(G)]
    return _write_run(folder, [plain])


@pytest.mark.slow
@pytest.mark.parametrize("text", EVIL, ids=range(len(EVIL)))
def test_hostile_text_is_only_text_in_terminal_and_page(text: str, tmp_path: Path) -> None:
    _hostile_run(tmp_path / "runs" / "evil", text)
    printed = _invoke(tmp_path, "evil", "--limit", "2")
    assert printed.exit_code == 0, printed.output
    assert not UNSHOWN.search(printed.output)
    assert "".join(shortened(text).split()) in "".join(printed.output.split())
    assert len(printed.output) < 30_000
    html = rollouts_page(choose_rollouts(tmp_path / "runs" / "evil"))
    page = Page(html)
    text_only = {"html", "head", "meta", "title", "style", "body", "main", "header", "section"}
    text_only |= {"h1", "h2", "div", "p", "pre", "span"}
    assert {tag for tag, _ in page.tags} <= text_only
    assert not page.references
    assert not UNSHOWN.search(page.text)
    assert page.text.count(shortened(text)) == 10 if len(text) < 100 else len(html) < 100_000


@pytest.mark.slow
def test_hostile_turns_of_a_conversation_are_only_text(tmp_path: Path) -> None:
    for number, text in enumerate(EVIL[:-1]):
        call = {"type": "function", "function": {"name": text, "arguments": {text: text}}}
        said = [
            {"role": "assistant", "content": text, "tool_calls": [call]},
            {"role": "tool", "name": text, "content": text},
            {"role": "assistant", "content": text},
        ]
        told = {"opening": text, "conversation": json.dumps(said), "turns": 2, "tool_calls": 1, "failed_tool_calls": 0}
        told |= {"environment_failure": text, "trained_tokens": [1, 0, 1]}
        prompt = [{"role": "user", "content": text}]
        given = {"numeric_match": 0.0, "length": None}
        rows = [sampled(1, 0, given, prompt=prompt, completion=text, **told) for _ in range(G)]
        folder = _write_run(tmp_path / "runs" / f"evil-{number}", [rows])
        printed = _invoke(tmp_path, folder.name)
        assert printed.exit_code == 0, printed.output
        page = Page(rollouts_page(choose_rollouts(folder)))
        assert not {tag for tag, _ in page.tags} & {"script", "img", "a", "link"}
        for shown in (printed.output, page.text):
            assert not UNSHOWN.search(shown)
            assert "".join(visible(text).split()) in "".join(shown.split())


def test_a_long_text_keeps_its_end_where_the_answer_stands() -> None:
    text = "begin" + "x" * 10_000 + "answer 7"
    short = shortened(text, 300)
    assert short.startswith("begin") and short.endswith("answer 7")
    left_out = int(re.findall(r"([\d,]+) more characters", short)[0].replace(",", ""))
    assert len(text) - left_out == 300
    assert shortened("x" * 300, 300) == "x" * 300


SURPRISING = LIMITS["surprise"]


@pytest.fixture(scope="module")
def tokenizer() -> Any:
    """One token per byte, so that most characters are several tokens."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    found = Tokenizer(models.BPE({letter: number for number, letter in enumerate(alphabet)}, []))
    found.pre_tokenizer, found.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    return PreTrainedTokenizerFast(tokenizer_object=found)


def _row(ids: list[int], **columns: Any) -> dict[str, Any]:
    return sampled(1, 0, {"numeric_match": 1.0}, completion_ids=ids, **columns)


@pytest.mark.slow
@given(text=st.text(max_size=60).filter(lambda text: "\ufffd" not in text))
def test_the_pieces_are_the_text_and_their_surprise_is_that_of_all_its_tokens(tokenizer: Any, text: str) -> None:
    ids = tokenizer(text)["input_ids"]
    logprobs = [-0.01 * (place + 1) for place in range(len(ids))]
    pieces = coloured_pieces(_row(ids, sampling_logprobs=logprobs, advantage=1.0), tokenizer, {"advantage": 1.0})
    assert "".join(piece.text for piece in pieces) == "".join(map(visible, text))
    assert len(pieces) == len(text)  # one per character
    together = math.prod(float(piece.title.removeprefix("p = ")) for piece in pieces)
    assert together == pytest.approx(math.exp(sum(logprobs)), rel=0.2)  # titles are rounded to three digits


def test_shades_follow_the_recorded_figures_and_what_was_not_trained_has_none(tokenizer: Any) -> None:
    ids = tokenizer("abcdef")["input_ids"]
    row = _row(
        ids,
        sampling_logprobs=[0.0, -SURPRISING / 2, -SURPRISING, -99.0, 0.0, -0.01],
        trained_tokens=[1, 1, 1, 1, 0, 1],
        ages=[0, 0, 1, 2, 0, 4],
        advantage=-0.5,
    )
    pieces = coloured_pieces(row, tokenizer, {"advantage": 1.0, "age": 4.0})
    levels = [piece.levels for piece in pieces]
    assert [it.get("surprise") for it in levels] == [0, LEVELS // 2, LEVELS, LEVELS, None, 1]
    assert [it.get("age") for it in levels] == [0, 0, 2, 4, None, 8]
    assert [it.get("advantage") for it in levels] == [-LEVELS // 2] * 4 + [None] + [-LEVELS // 2]


def test_ratio_and_entropy_of_the_trained_policy_colour_where_they_were_computed(tokenizer: Any) -> None:
    row = _row(
        tokenizer("abc")["input_ids"],
        sampling_logprobs=[-1.0, -3.0, -0.5],
        trained_logprobs=[-1.0, -1.0, -4.5],
        entropies=[0.0, 1.5, 3.0],
        advantage=1.0,
    )
    pieces = coloured_pieces(row, tokenizer, {"advantage": 1.0})
    assert [piece.levels["ratio"] for piece in pieces] == [0, LEVELS, -LEVELS]
    assert [piece.levels["entropy"] for piece in pieces] == [0, LEVELS // 2, LEVELS]
    assert [piece.title.split(", ")[1] for piece in pieces] == ["ratio 1", "ratio 7.39", "ratio 0.0183"]


def test_of_a_long_completion_the_beginning_and_the_end_are_shown(tokenizer: Any) -> None:
    ids = tokenizer("a" * 10_000 + "z")["input_ids"]
    pieces = coloured_pieces(_row(ids), tokenizer, {})
    assert len(pieces) == MOST_TOKENS + 1
    assert pieces[-1].text == "z"
    [gap] = [piece.text for piece in pieces if not piece.levels]
    assert gap == f" … {10_001 - MOST_TOKENS:,} more tokens … "
