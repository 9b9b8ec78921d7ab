"""An export is compared with the trained policy as it was evaluated: what was lost on the way is found."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import polars as pl
import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from grpo_core.evaluation.exported import evaluate_exported
from grpo_core.evaluation.run import evaluate
from tasks.publishing import bfloat16
from tasks.publishing.verdict import verdict
from tests.conftest import config_values, make_model, make_run, write_sums

pytestmark = pytest.mark.slow
DROP = 0.1  # with 48 prompts and no difference, the interval reaches -7.4 points


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run whose trained policy, a random model, is right on each held-out prompt: the answers are its own."""
    folder = tmp_path_factory.mktemp("exported")
    base = make_model(folder / "base")
    values = {**config_values(base, folder, max_completion_length=5), "rewards": [{"function": "exact_match"}]}
    run = make_run(folder / "run", values)
    write_sums(prompts := run / "dataset" / "eval.parquet", 20, 68)
    trained = make_model(run / "training" / "model", initializer_range=0.3)
    weights = {name: 1.5 * each for name, each in load_file(trained / "model.safetensors").items()}
    save_file(weights, trained / "model.safetensors", {"format": "pt"})
    (run / "evaluation").mkdir()
    evaluate(run, run / "evaluation")
    said = pl.read_parquet(run / "evaluation" / "samples.parquet").sort("row")["trained/completion"]
    pl.read_parquet(prompts).with_columns(answer=said).write_parquet(prompts)
    assert said.n_unique() > 10
    report = evaluate(run, run / "evaluation")
    assert report["sets"]["held-out"]["policies"]["trained"]["accuracy"]["mean"] == 1
    (run / "evaluation" / "report.json").write_text(json.dumps(report))
    return run


def _change(folder: Path, change: Callable[[dict[str, torch.Tensor]], Any]) -> None:
    weights = load_file(file := folder / "model.safetensors")
    change(weights)
    save_file(weights, file, {"format": "pt"})


def _swap_digits(folder: Path) -> None:
    text = json.loads((file := folder / "tokenizer.json").read_text())
    vocabulary = text["model"]["vocab"]
    vocabulary["1"], vocabulary["2"] = vocabulary["2"], vocabulary["1"]
    file.write_text(json.dumps(text))


def _damage(folder: Path) -> None:
    _change(folder, lambda weights: weights["model.layers.1.mlp.down_proj.weight"].mul_(-1))


FAULTS: dict[str, Callable[[Path], None]] = {"another tokenizer": _swap_digits, "a damaged tensor": _damage}


@pytest.mark.parametrize("fault", [None, *FAULTS])
def test_a_copy_is_kept_and_a_faulty_one_is_worse(run: Path, fault: str | None, tmp_path: Path) -> None:
    folder = Path(shutil.copytree(run / "training" / "model", tmp_path / "copy"))
    if fault:
        FAULTS[fault](folder)
    report = evaluate_exported(run, folder)
    found, (kept, sentence) = report["sets"]["held-out"], verdict(report, DROP)
    assert found["trained"] == 1
    assert found["exported"] == found["equal"] / found["answers"], "right are the trained policy's answers alone"
    if fault is None:
        assert (found["equal"], kept) == (48, True)
    else:
        assert not kept
        assert sentence.startswith("worse than the trained policy: accuracy -")


def test_a_bfloat16_copy_has_each_weight_rounded_once_and_computes_in_bfloat16(
    run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source, folder = run / "training" / "model", tmp_path / "bfloat16"
    shutil.copytree(source, folder, ignore=shutil.ignore_patterns("*.safetensors"))
    monkeypatch.setattr("sys.argv", ["bfloat16", str(source), str(folder)])
    bfloat16.main()
    held, copied = load_file(source / "model.safetensors"), load_file(folder / "model.safetensors")
    assert held.keys() == copied.keys()
    assert all(torch.equal(each.to(torch.bfloat16), copied[name]) for name, each in held.items())
    assert AutoModelForCausalLM.from_pretrained(folder, dtype="auto").dtype == torch.bfloat16
    report = evaluate_exported(run, folder)["sets"]["held-out"]
    assert 24 < report["equal"] <= 48, "rounding changes answers of a random model, and not most"
