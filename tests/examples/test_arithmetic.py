"""The arithmetic example's data, and its base: the one that is kept, and how it was taught."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from examples import tiny
from examples.arithmetic import make, teach

ROOT = Path(__file__).parents[2]


def make_in(folder):
    command = [sys.executable, "-m", "examples.arithmetic.make", "--out", folder]
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    return subprocess.run(command, env=environment, capture_output=True, text=True)


@pytest.fixture(scope="module")
def tokenizer():
    return teach.make_tokenizer()


def operands(row):
    return tuple(map(int, re.fullmatch(r"(\d\d)\+(\d\d)=", row["prompt"]).groups()))


def test_every_answer_is_the_sum():
    train, held = make.make_rows()
    assert (len(train), len(held)) == (5000, 500)
    assert all(row["answer"] == str(sum(operands(row))) for row in train + held)


def test_no_held_out_sum_is_trained_on_in_either_order():
    train, held = (set(map(operands, rows)) for rows in make.make_rows())
    assert (len(train), len(held)) == (5000, 500)  # no duplicates either
    assert not train & (held | {(b, a) for a, b in held})


def test_rows_depend_on_the_seed_alone():
    assert make.make_rows(1) == make.make_rows(1) != make.make_rows(2)


def test_tokenizer_read_beside_its_model_is_the_one_written(tokenizer, tmp_path):
    from transformers import AutoTokenizer

    model = tiny.make_model(tokenizer, teach.CONTEXT, **teach.SIZES)
    model.config.save_pretrained(tmp_path)  # the model's type decides the tokenizer's class
    tokenizer.save_pretrained(tmp_path)
    read = AutoTokenizer.from_pretrained(tmp_path)
    assert read.backend_tokenizer.to_str() == tokenizer.backend_tokenizer.to_str()
    for each in (tokenizer, read):
        assert type(each) is type(tokenizer)
        assert (each.bos_token_id, each.pad_token_id, each.eos_token_id, len(each)) == (None, 0, 1, 15)
        ids = each.encode("12+34=46")
        assert len(ids) == 8 and each.unk_token_id not in ids
        assert each.decode(ids) == "12+34=46"
        assert each.decode([*ids, each.eos_token_id], skip_special_tokens=True) == "12+34=46"
        assert each(["1+", "1+2"], padding=True)["attention_mask"] == [[0, 1, 1], [1, 1, 1]]


def test_loss_looks_at_the_answer_and_its_end_only(tokenizer):
    rows = [{"prompt": "12+34=", "answer": "46"}, {"prompt": "99+99=", "answer": "198"}]
    inputs, labels = teach.encode(rows, tokenizer)
    assert tokenizer.batch_decode(inputs) == ["12+34=46<eos><pad>", "99+99=198<eos>"]
    assert [tokenizer.decode(row[row != -100]) for row in labels] == ["46<eos>", "198<eos>"]


def test_measured_greedy_accuracy_is_that_of_generating(tokenizer):
    import torch

    torch.manual_seed(0)
    model = tiny.make_model(tokenizer, teach.CONTEXT, **teach.SIZES).eval()
    prompt = tokenizer("12+34=", return_tensors="pt")
    written = tokenizer.decode(model.generate(**prompt, max_new_tokens=3)[0, 6:])
    for answer, expected in [(written, 1.0), ("0" if written[0] != "0" else "1", 0.0)]:
        inputs, labels = teach.encode([{"prompt": "12+34=", "answer": answer}], tokenizer)
        # the end of the text is left out: an untrained model does not write it
        assert teach.greedy_accuracy(model, inputs[:, :-1], labels[:, :-1]) == expected


def test_folder_it_did_not_make_is_left_alone(tmp_path):
    (tmp_path / "thesis.txt").write_text("mine")
    run = make_in(tmp_path)
    assert run.returncode != 0 and "did not make" in run.stderr
    assert [path.name for path in tmp_path.iterdir()] == ["thesis.txt"]


def test_the_second_run_leaves_what_the_first_made(tmp_path):
    said = [make_in(tmp_path / "out").stdout for _ in range(2)]
    assert "up to date" not in said[0] and "up to date" in said[1]
    made = {path.name for path in (tmp_path / "out").iterdir()}
    assert made == {"base", "train.parquet", "eval.parquet", "info.json"}


def test_the_base_that_is_kept_is_of_this_tokenizer_and_gets_some_of_the_held_out_sums_right(tokenizer):
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    kept = AutoTokenizer.from_pretrained(make.BASE)
    assert kept.backend_tokenizer.to_str() == tokenizer.backend_tokenizer.to_str()
    model = AutoModelForCausalLM.from_pretrained(make.BASE)
    assert {weights.dtype for weights in model.parameters()} == {torch.float32}
    accuracy = teach.greedy_accuracy(model, *teach.encode(make.make_rows()[1], kept))
    assert accuracy == pytest.approx(0.422, abs=0.01)  # sums whose two likeliest digits are nearly as likely


def test_a_base_is_taught_and_written_as_the_one_that_is_kept(tmp_path, monkeypatch):
    from safetensors.torch import load_file

    monkeypatch.setattr(teach, "TARGET", 0.0)
    monkeypatch.setattr(teach, "EVAL_EVERY", 1)
    teach.write(*teach.train_base(*make.make_rows()), tmp_path)
    assert {path.name for path in tmp_path.iterdir()} == {path.name for path in make.BASE.iterdir()}
    taught, kept = (load_file(folder / "model.safetensors") for folder in (tmp_path, make.BASE))
    assert {name: (it.shape, it.dtype) for name, it in taught.items()} == {
        name: (it.shape, it.dtype) for name, it in kept.items()
    }
