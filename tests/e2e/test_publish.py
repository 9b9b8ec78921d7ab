"""A small run is published: plain transformers answers from the exported folder as evaluated, by the lines of its model
card, and a push that failed goes on without another evaluation."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import mlflow
import pytest
import tomli_w
from huggingface_hub import ModelCard

from benchmarks.command import ROOT, python_path
from grpo_core.system.tables import read_parquet
from tests.conftest import small_quickstart, write_inputs
from tests.stand_in_hub import TOKEN, Hub, hub

pytestmark = pytest.mark.e2e
Grpo = Callable[..., tuple[int, str]]


def _grpo(folder: Path, **environment: str) -> Grpo:
    """Runs `grpo WORDS`; gives its status and what it prints."""
    inherited = {name: value for name, value in os.environ.items() if name != "HF_HUB_OFFLINE"}
    inherited |= {"GRPO_STORAGE": str(folder / "storage"), "PYTHONPATH": python_path(ROOT), "COLUMNS": "400"}

    def grpo(*words: str) -> tuple[int, str]:
        command = [sys.executable, "-m", "flows.cli.main", *words]
        done = subprocess.run(
            command, cwd=folder, env=inherited | environment, capture_output=True, text=True, timeout=1200
        )
        return done.returncode, done.stdout + done.stderr

    return grpo


def _write_config(folder: Path, formats: list[str], **publish: str | float) -> None:
    values = small_quickstart("small", write_inputs(folder, held_out=100), {"max_steps": 3, "learning_rate": 1e-2})
    values["rewards"] = [{"function": "length", "args": {"target": 3}}, {"function": "numeric_match"}]
    values["rollout"] |= {"num_generations": 8, "max_completion_length": 6, "stop": ["7"]}
    values["train"] |= {"gradient_accumulation_steps": 1, "mixed_precision": "no"}
    values["model"] |= {"use_peft": True}
    values["promotion"] = {"metric": "accuracy"}
    values["publish"] = {"formats": formats, "max_drop": 0.2, **publish}
    (folder / "config.toml").write_text(tomli_w.dumps(values))


def test_a_run_is_exported_pushed_and_used_as_its_card_says(tmp_path: Path) -> None:
    _write_config(tmp_path, ["bfloat16", "huggingface"], hub_repository="ada/sums")
    run, stand_in = tmp_path / "storage" / "runs" / "small", Hub(refused="commit/")
    with hub(stand_in) as address:
        grpo = _grpo(tmp_path, HF_ENDPOINT=address, HF_TOKEN=TOKEN)
        status, said = grpo("run", "config.toml")
        assert status == 1
        assert "the hub (http://127.0.0.1" in said
        assert (run / "registration.json").exists()
        assert not (run / "published").exists()
        stand_in.refused = ""
        status, again = grpo("run", "config.toml")
    assert status == 0, again
    assert "evaluating the exported policy on 100 prompts" in said
    assert "evaluating the exported policy" not in again
    published = run / "published"
    exports = json.loads((published / "report.json").read_text())["exports"]
    for made, name in (("bfloat16", "ada/sums"), ("huggingface", "ada/sums-huggingface")):
        assert exports[made]["kept"]
        assert f"{published / made}: {exports[made]['verdict']}" in again
        files = {str(file.relative_to(published / made)): file.read_bytes() for file in (published / made).rglob("*")}
        assert {path: held for path, held in stand_in.files[name].items() if path != ".gitattributes"} == files
    assert TOKEN not in said + again
    assert not any(TOKEN.encode() in file.read_bytes() for file in (tmp_path / "storage").rglob("*") if file.is_file())
    client = mlflow.MlflowClient(f"sqlite:///{tmp_path / 'storage' / 'mlflow' / 'mlflow.db'}")
    [version] = client.search_model_versions("name = 'small'")
    assert version.tags["published.bfloat16.verdict"] == exports["bfloat16"]["verdict"]
    assert version.tags["published.huggingface.folder"] == str(published / "huggingface")

    evaluated = read_parquet(run / "evaluation" / "samples.parquet").sort("row")
    card = ModelCard.load(published / "huggingface" / "README.md")
    [lines] = re.findall(r"```python\n(.*?)```", card.text, re.DOTALL)
    loading, _, asking = lines.replace("'ada/sums-huggingface'", repr(str(published / "huggingface"))).partition(
        "inputs ="
    )
    scope: dict[str, object] = {}
    exec(loading, scope)
    for prompt, expected in evaluated.select("prompt", "trained/completion").head(20).iter_rows():
        answers: list[str] = []
        exec(f"inputs ={asking}", scope | {"prompt": prompt, "print": answers.append})
        assert answers[0].removesuffix("7") == expected.removesuffix("7"), prompt
    status, said = grpo("stage", "publish", "--run", "small")
    assert (status, "publish: up to date" in said) == (0, True), said


@pytest.mark.skipif(not os.environ.get("GRPO_QUANTIZE_PYTHON"), reason="GRPO_QUANTIZE_PYTHON has no llm-compressor")
def test_codes_of_8_and_4_bits_are_made_and_judged(tmp_path: Path) -> None:
    _write_config(tmp_path, ["int8", "int4"])
    status, said = _grpo(tmp_path)("run", "config.toml")
    assert status == 0, said
    published = tmp_path / "storage" / "runs" / "small" / "published"
    exports = json.loads((published / "report.json").read_text())["exports"]
    for made, bits in (("int8", 8), ("int4", 4)):
        codes = json.loads((published / made / "config.json").read_text())["quantization_config"]
        assert codes["config_groups"]["group_0"]["weights"]["num_bits"] == bits
        assert exports[made]["sets"]["held-out"]["answers"] == 100
    equal = {made: exports[made]["sets"]["held-out"]["equal"] for made in exports}
    assert equal["int4"] < equal["int8"]
