"""The recipes' examples: right answers, held-out tasks that are new, and a script that says what the config says.

Their training is exercised by tests/e2e/test_recipes.py."""

from __future__ import annotations

import ast
import io
import json
import operator
import os
import random
import re
import shlex
import sys
import tomllib
from contextlib import nullcontext
from pathlib import Path
from statistics import mean
from typing import Any

import numpy as np
import polars as pl
import pyarrow.parquet as pq
import pytest
from PIL import Image
from scipy.ndimage import label

from examples import tiny
from examples.calculator import larger
from examples.calculator import make as calculator
from examples.code import make as code
from examples.code import mbpp
from examples.distil import make as distil
from examples.guess import larger as larger_games
from examples.guess import make as guess
from examples.guess.game import Guess
from examples.maths import gsm8k
from examples.maths import make as maths
from examples.python import gsm8k as gsm8k_by_programs
from examples.python import make as programs
from examples.shapes import make as shapes
from examples.smallest import make as smallest
from examples.smollm import make as smollm
from examples.smollm import show as smollm_answers
from examples.warmstart import make as warmstart
from grpo_core.environments.builtin.calculator import calculator as calculator_tool
from grpo_core.environments.calls import ToolCall, read_turn
from grpo_core.environments.turns import TurnFormat

ROOT = Path(__file__).parents[2]
GAINS = {"buys": 1, "finds": 1, "gets": 1, "loses": -1, "gives": -1, "sells": -1}


def test_a_word_problems_answer_is_what_its_words_come_to() -> None:
    for numbers in maths.make_problems()[0][:300]:
        row = maths.make_row(numbers)
        question = row["prompt"][-1]["content"]
        total = int(re.search(r"has (\d+)", question)[1])
        for verb, n in re.findall(r"(\w+)(?: away)? (\d+)(?= and|\.)", question.partition("then")[2]):
            total += GAINS[verb] * int(n)
        assert row["answer"] == str(total)


def test_the_bases_digits_are_one_too_high_and_the_teachers_are_right() -> None:
    train, held = distil.make_numbers()
    assert len({*train, *held}) == distil.TRAIN_ROWS + distil.EVAL_ROWS
    row = distil.make_row("1234590")
    assert row == {"prompt": "1234590>", "answer": "0954321"}
    rng = random.Random(0)
    assert distil.demonstrate(row["answer"], 1.0, rng) == "0954321"
    assert distil.demonstrate(row["answer"], 0.0, rng) == "1065432"


@pytest.mark.parametrize("right", [0.0, 1.0])
def test_the_base_never_says_the_sum_alone_and_the_demonstrations_do(
    right: float, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(warmstart, "RIGHT", right)
    taught: list[tiny.Demonstration] = []
    monkeypatch.setattr(tiny, "make_base", lambda folder, demonstrations, steps: taught.extend(demonstrations))
    warmstart.make(tmp_path)
    held = {row["prompt"] for row in pq.read_table(tmp_path / "eval.parquet").to_pylist()}
    shown = [json.loads(line) for line in (tmp_path / "demonstrations.jsonl").read_text().splitlines()]
    assert not held & {*(row["prompt"] for row in shown), *(str(prompt) for prompt, _ in taught)}
    assert all(row["completion"] == str(_sum(row["prompt"])) for row in shown)
    for prompt, said in taught:
        number, comma, _ = str(said).partition(",")
        assert comma and abs(int(number) - _sum(str(prompt))) == 1 - right


def test_a_pictures_answer_is_the_number_of_its_shapes_of_the_colour_and_no_two_pictures_are_alike() -> None:
    train, held = shapes.make_rows()
    assert len({_pixels(row).tobytes() for row in train + held}) == shapes.TRAIN_ROWS + shapes.EVAL_ROWS
    for row in train[:300] + held:
        colour = row["prompt"][0]["content"].removeprefix("How many ").removesuffix(" shapes are there?")
        alike = (_pixels(row) == shapes.COLOURS[colour]).all(-1)
        assert row["answer"] == str(label(alike)[1])


def test_demonstrated_counts_are_right_or_one_shape_short() -> None:
    rng = random.Random(0)
    said = [(int(row["answer"]), int(str(shapes.demonstrate(row, rng)[1]))) for row in shapes.make_rows()[0][:500]]
    assert all(counted == right for right, counted in said if right <= shapes.FEW)
    missed = [right - counted for right, counted in said if right > shapes.FEW]
    assert {*missed} == {0, 1}
    assert mean(missed) == pytest.approx(shapes.HASTE, abs=0.1)


@pytest.mark.slow
def test_a_picture_is_taught_as_the_saved_processor_and_chat_template_write_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from transformers import AutoImageProcessor, AutoModelForImageTextToText, AutoTokenizer

    monkeypatch.setattr(shapes, "STEPS", 1)
    row = shapes.make_row(shapes.png(shapes.draw([("circle", "red"), ("square", "blue")], random.Random(0))), "red", 1)
    shapes.make_base(tmp_path, [row])
    model, found = AutoModelForImageTextToText.from_pretrained(tmp_path, output_loading_info=True)
    assert not any(found.values())
    assert type(model).__name__ == "Qwen2_5_VLForConditionalGeneration"
    [grid] = AutoImageProcessor.from_pretrained(tmp_path)([Image.fromarray(_pixels(row))])["image_grid_thw"]
    assert grid.tolist() == [1, shapes.CELLS, shapes.CELLS]
    assert grid.prod() // model.config.vision_config.spatial_merge_size**2 == shapes.IMAGE_TOKENS
    tokenizer = AutoTokenizer.from_pretrained(tmp_path)
    asked = [{"role": "user", "content": [{"type": "image"}, {"type": "text", "text": row["prompt"][0]["content"]}]}]
    [[image, question]] = [tokenizer.apply_chat_template(asked, tokenize=False).partition(shapes.IMAGE)[1:]]
    taught = tokenizer.apply_chat_template(shapes.demonstrate(row, random.Random(0))[0], tokenize=False)
    assert taught.endswith(image * shapes.IMAGE_TOKENS + question)
    assert tokenizer(taught)["input_ids"].count(model.config.image_token_id) == shapes.IMAGE_TOKENS


def _pixels(row: dict[str, Any]) -> np.ndarray:
    return np.asarray(Image.open(io.BytesIO(row["image"])))


def _sum(prompt: str) -> int:
    return sum(map(int, prompt.rstrip("=").split("+")))


@pytest.mark.parametrize("haste", [False, True])
def test_demonstrated_word_problems_are_right_but_for_the_second_step(
    haste: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(maths, "HASTE", float(haste))
    monkeypatch.setattr(maths, "FORMED_HASTE", float(haste))
    rng = random.Random(0)
    for numbers in maths.make_problems()[0][:300]:
        said = maths.demonstrate(numbers, rng)
        steps = re.findall(r"(\d+)([+-]\d+)=(\d+)\.", said)
        assert steps[0][:2] == (str(numbers[0]), f"{numbers[1]:+}")
        assert all(int(before) + int(n) == int(after) for before, n, after in steps)
        told = numbers[:2] if haste else numbers
        assert len(steps) == len(told) - 1
        assert re.findall(r"\d+", said)[-1] == str(sum(told))


def test_a_right_program_passes_the_tests_of_its_task_and_the_tests_know_tasks_apart() -> None:
    sign = {"add": operator.add, "subtract": operator.sub, "multiply by": operator.mul}
    train, held = code.make_tasks()
    for task in train + held:
        row = code.make_row(task)

        def f(x: int, said: str = row["prompt"][-1]["content"]) -> int:
            for word, n in re.findall(r"(add|subtract|multiply by) (\d)", said):
                x = sign[word](x, int(n))
            return x

        for test in row["tests"]:
            exec(test, {"f": f})


@pytest.mark.parametrize("slips", [False, True])
def test_demonstrated_programs_are_right_but_for_their_slips(slips: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(code, "SLIPS", float(slips))
    rng = random.Random(0)
    passed = []
    for task in code.make_tasks()[0]:
        said = code.demonstrate(task, rng)
        block = re.fullmatch(r"```python\n(.*)\n```", said, re.DOTALL)
        names: dict[str, Any] = {}
        try:
            exec(block[1] if block else "", names)
            for test in code.make_row(task)["tests"]:
                exec(test, names)
        except (SyntaxError, NameError, AssertionError):
            passed.append(False)
        else:
            passed.append(True)
    assert all(passed) != slips
    assert not slips or 0 < sum(passed) / len(passed) < 0.5  # a slip may come to the same


@pytest.mark.parametrize(
    "example",
    [
        *(maths.make_problems, code.make_tasks, smallest.make_posts, calculator.make_pairs, programs.make_problems),
        warmstart.make_pairs,
    ],
)
def test_no_held_out_task_is_a_training_task_and_the_seed_says_which(example: Any) -> None:
    train, held = example()
    assert len(set(train) | set(held)) == len(train) + len(held)
    assert (train, held) == example(tiny.SEED) != example(tiny.SEED + 1)


def test_products_have_six_digits_and_no_held_out_one_is_trained_on_in_either_order() -> None:
    train, held = calculator.make_pairs()
    assert {len(str(a * b)) for a, b in train + held} == {6}
    assert not {*map(frozenset, train)} & {*map(frozenset, held)}


def test_the_calculators_answers_are_what_the_calculator_answers() -> None:
    for pair in calculator.make_pairs()[1]:
        row = calculator.make_row(pair)
        assert row["answer"] == calculator_tool(row["prompt"][0]["content"])
    for row in larger.make_rows()[1]:
        asked = row["prompt"][0]["content"]
        expression = asked.removeprefix("What is ").partition("?")[0].replace(",", "").replace("×", "*")
        assert row["answer"] == calculator_tool(expression)


def test_a_demonstrated_conversation_is_put_together_as_a_sampled_one_and_the_tools_answer_is_not_learnt() -> None:
    prompt, call = [{"role": "user", "content": "2*3"}], ToolCall("calculator", {"expression": "2*3"})
    said = [tiny.call("calculator", expression="2*3"), tiny.answer("6"), tiny.say("It is 6")]
    tokenizer = tiny.make_tokenizer([(prompt, said)])
    turns = TurnFormat(tokenizer, (tiny.END,), {})
    end = tokenizer.eos_token_id
    first, last = (tokenizer(text)["input_ids"] for text in (turns.write([call]), "It is 6"))
    answer = turns.answer([{"role": "tool", "name": "calculator", "content": "6"}])
    inputs, labels = tiny.encode([(prompt, said)], tokenizer)
    shown = turns.prompt(prompt, [])
    assert inputs[0].tolist() == [*shown, *first, end, *answer, *last, end]
    assert labels[0].tolist() == [-100] * len(shown) + [*first, end] + [-100] * len(answer) + [*last, end]
    assert turns.read([*first, end], {})[1] == [call]


def test_binary_search_is_the_optimal_game_and_every_guess_is_answered_truly() -> None:
    secrets = range(1, guess.HIGHEST + 1)
    games = [guess.play(secret, guess.middle) for secret in secrets]
    assert [len(game) for game in games] == [3, 2, 3, 1, 3, 2, 3]
    rng = random.Random(0)
    for secret in secrets:
        left = {*range(1, guess.HIGHEST + 1)}
        for number, answer in guess.play(secret, guess.anything(rng)):
            said, _, told = answer.partition(": ")
            assert said == ("right" if number == secret else "higher" if secret > number else "lower")
            left = {other for other in left if (other > number) == (secret > number)} - {number}
            assert told == ("" if number == secret else f"{min(left)} to {max(left)}")


def test_a_game_rewards_fewer_guesses_and_is_over_when_the_number_is_found() -> None:
    game = Guess(most_guesses=4)
    rewards = []
    for wrong in range(5):
        game.reset(secret=5, low=1, high=7)
        for _ in range(min(wrong, 4)):
            assert game.guess(3) == "higher: 4 to 7"
        with pytest.raises(ValueError, match="over") if wrong == 4 else nullcontext():
            assert game.guess(5) == "right"
        rewards.append(game.get_reward())
        with pytest.raises(ValueError, match="over"):
            game.guess(5)
    assert rewards == [1, 0.75, 0.5, 0.25, 0]


def test_held_out_games_have_prompts_of_their_own_and_all_secrets() -> None:
    for train, held in (guess.make_rows(), larger_games.make_rows()):
        asked = [row["prompt"][0]["content"] for row in train + held]
        assert len(set(asked)) == len(asked)
        for row in train + held:
            low, high = map(int, re.search(r"(\d+) to (\d+)", row["prompt"][0]["content"]).groups())
            assert low == row["low"] <= row["secret"] <= row["high"] == high
    for games in guess.make_rows():
        secrets = [row["secret"] for row in games]
        assert {secrets.count(secret) for secret in range(1, guess.HIGHEST + 1)} == {len(games) // guess.HIGHEST}


@pytest.mark.needs("bwrap")
@pytest.mark.parametrize("slips", [False, True])
def test_demonstrated_programs_print_the_answer_but_for_their_slips(
    slips: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    from grpo_core.environments.builtin.python import python as python_tool

    monkeypatch.setattr(programs, "SLIPS", float(slips))
    monkeypatch.setattr(programs, "PROGRAMS", 1.0)
    rng = random.Random(0)
    for numbers in programs.make_problems()[1]:
        row = programs.make_row(numbers)
        asked = row["prompt"][0]["content"]
        total = int(re.search(r"has (\d+)", asked)[1])
        for verb, n in re.findall(r"(\w+) (\d+)(?= and|\.)", asked.partition("then")[2]):
            total += {**GAINS, "eats": -1}[verb] * int(n)
        assert row["answer"] == str(total)
        called, printed, last = programs.demonstrate(numbers, rng)
        _, (call,) = read_turn("hermes", called["content"], {})
        assert f"{eval(call.arguments['code'].removeprefix('print'))}\n" == printed["content"] == f"{last['content']}\n"
        assert (last["content"] == row["answer"]) != slips
    assert python_tool(**call.arguments) == printed["content"]


def test_a_model_that_cannot_be_read_is_not_downloaded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "gguf", None)
    monkeypatch.setattr(smollm, "download", lambda folder: pytest.fail("it was downloaded"))
    python = re.escape(shlex.quote(sys.executable))
    with pytest.raises(SystemExit, match=rf"the package gguf: .*; {python} -m pip install gguf$"):
        smollm.make(tmp_path)


def test_the_answers_of_the_run_that_was_evaluated_last_are_shown(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(smollm_answers, "RUNS", tmp_path)
    with pytest.raises(SystemExit, match="has been evaluated yet"):
        smollm_answers.main()
    for age, name in enumerate(("newest", "older")):
        (folder := tmp_path / name / "evaluation").mkdir(parents=True)
        asked = [[{"role": "user", "content": f"{name}: {number} + 1?"}] for number in range(7)]
        rows = {"set": "held-out", "sample": 0, "prompt": asked, "answer": [str(number + 1) for number in range(7)]}
        said = {"base/completion": ["I think"] * 7, "trained/completion": rows["answer"]}
        pl.DataFrame(rows | said).write_parquet(folder / "samples.parquet")
        os.utime(folder / "samples.parquet", (1000 - age, 1000 - age))
    smollm_answers.main()
    lines = capsys.readouterr().out.splitlines()
    assert lines[:4] == ["", "newest: 0 + 1?  (right: 1)", "  base    'I think'", "  trained '1'"]
    assert len(lines) == 4 * smollm_answers.PROMPTS


def test_gsm8k_becomes_a_conversation_and_a_number() -> None:
    for script in (gsm8k, gsm8k_by_programs):
        row = script.make_row({"question": "How many?", "answer": "600*2=<<600*2=1200>>1200 #1\n#### 1,200"})
        assert [message["role"] for message in row["prompt"]] == ["system", "user"]
        assert (row["prompt"][1]["content"], row["answer"]) == ("How many?", "1200")


def test_an_mbpp_task_shows_a_test_that_does_not_count() -> None:
    tests = ["assert double(1) == 2", "assert double(2) == 4", "assert double(0) == 0"]
    row = mbpp.make_row({"text": "Double a number.", "test_list": tests})
    (message,) = row["prompt"]
    assert (message["role"], row["tests"]) == ("user", tests[1:])
    assert "Double a number." in message["content"]
    assert [test in message["content"] for test in tests] == [True, False, False]


@pytest.mark.parametrize(
    "prompt", ["2+3=", [{"role": "system", "content": "Add."}, {"role": "user", "content": "2+3="}]]
)
def test_the_base_learns_the_completion_and_its_end_and_reads_prompts_as_a_training_does(prompt: Any) -> None:
    from grpo_core.data.chat import encode_prompts

    tokenizer = tiny.make_tokenizer([(prompt, "5é")])
    inputs, labels = tiny.encode([(prompt, "5é"), (prompt, "5é5é5é")], tokenizer)
    assert [tokenizer.decode(row[row != -100]) for row in labels] == ["5é<|im_end|>", "5é5é5é<|im_end|>"]
    shown = inputs[1][labels[1] == -100].tolist()
    assert encode_prompts([prompt], tokenizer) == [shown]


def test_the_trl_script_says_what_the_configuration_says() -> None:
    script = ast.parse((ROOT / "examples" / "smallest" / "train_trl.py").read_text())
    (call,) = (
        node for node in ast.walk(script) if isinstance(node, ast.Call) and getattr(node.func, "id", "") == "GRPOConfig"
    )
    theirs = {each.arg: ast.literal_eval(each.value) for each in call.keywords}
    config = tomllib.loads((ROOT / "configs" / "smallest.toml").read_text())
    ours = {"seed": config["seed"], **config["rollout"], **config["train"]}
    only_ours, only_theirs = {"engine"}, {"output_dir", "bf16", "use_cpu", "logging_steps", "report_to"}
    assert {key: theirs[key] for key in theirs.keys() - only_theirs} == {
        key: ours[key] for key in ours.keys() - only_ours
    }
