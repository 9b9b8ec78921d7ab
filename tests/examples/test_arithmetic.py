"""The arithmetic example's data and tokenizer; its training is exercised by the quickstart itself."""

import re
import runpy
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parents[2] / "examples" / "arithmetic" / "make.py"
make = runpy.run_path(str(SCRIPT))


@pytest.fixture(scope="module")
def tokenizer():
    return make["make_tokenizer"]()


def operands(row):
    return tuple(map(int, re.fullmatch(r"(\d\d)\+(\d\d)=", row["prompt"]).groups()))


def test_every_answer_is_the_sum():
    train, held = make["make_rows"]()
    assert (len(train), len(held)) == (5000, 500)
    assert all(row["answer"] == str(sum(operands(row))) for row in train + held)


def test_no_held_out_sum_is_trained_on_in_either_order():
    train, held = (set(map(operands, rows)) for rows in make["make_rows"]())
    assert (len(train), len(held)) == (5000, 500)  # no duplicates either
    assert not train & (held | {(b, a) for a, b in held})


def test_rows_depend_on_the_seed_alone():
    assert make["make_rows"](1) == make["make_rows"](1) != make["make_rows"](2)


def test_tokenizer_read_beside_its_model_is_the_one_written(tokenizer, tmp_path):
    from transformers import AutoTokenizer

    make["make_model"](tokenizer).config.save_pretrained(tmp_path)  # the model's type decides the tokenizer's class
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
    inputs, labels = make["encode"](rows, tokenizer)
    assert tokenizer.batch_decode(inputs) == ["12+34=46<eos><pad>", "99+99=198<eos>"]
    assert [tokenizer.decode(row[row != -100]) for row in labels] == ["46<eos>", "198<eos>"]


def test_measured_greedy_accuracy_is_that_of_generating(tokenizer):
    import torch

    torch.manual_seed(0)
    model = make["make_model"](tokenizer).eval()
    prompt = tokenizer("12+34=", return_tensors="pt")
    written = tokenizer.decode(model.generate(**prompt, max_new_tokens=3)[0, 6:])
    for answer, expected in [(written, 1.0), ("0" if written[0] != "0" else "1", 0.0)]:
        inputs, labels = make["encode"]([{"prompt": "12+34=", "answer": answer}], tokenizer)
        # the end of the text is left out: an untrained model does not write it
        figures = make["measure"](model, inputs[:, :-1], labels[:, :-1])
        assert figures["greedy_accuracy"] == expected
        assert 0 < figures["sampled_accuracy"] < figures["pass_at_8"] < 1


def test_folder_it_did_not_make_is_left_alone(tmp_path):
    (tmp_path / "thesis.txt").write_text("mine")
    run = subprocess.run([sys.executable, SCRIPT, "--out", tmp_path], capture_output=True, text=True)
    assert run.returncode != 0 and "did not make" in run.stderr
    assert [path.name for path in tmp_path.iterdir()] == ["thesis.txt"]


def test_second_run_does_nothing(tmp_path):
    import hashlib
    import json

    source = hashlib.sha256(SCRIPT.read_bytes()).hexdigest()
    (tmp_path / "info.json").write_text(json.dumps({"source": source}))
    run = subprocess.run([sys.executable, SCRIPT, "--out", tmp_path], capture_output=True, text=True, check=True)
    assert "up to date" in run.stdout
    assert [path.name for path in tmp_path.iterdir()] == ["info.json"]
