"""What the end of a training needs is tried before its first update."""

from __future__ import annotations

import copy
import json
import shutil
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import transformers

from grpo_core.config.files import load_config
from grpo_core.config.inputs import ModelConfig
from grpo_core.errors import TrainingError
from grpo_core.planning.plan import load_plan
from grpo_core.training import end_rehearsal, loop
from grpo_core.training.end_rehearsal import disk_needed, rehearse_end
from grpo_core.training.loop import train
from tests.conftest import make_model, make_run, make_tokenizer, with_keys

# One of each kind: plain, tied, experts, latent attention, capped, layers of two kinds, of two widths, with a state.
ARCHITECTURES = (
    "llama",
    "gpt2",
    "qwen3_moe",
    "deepseek_v3",
    "gpt_oss",
    "gemma2",
    "gemma3_text",
    "gemma4_text",
    "mamba2",
)
ARCHITECTURES += ("nemotron_h", "qwen3_next", "glm4_moe", "falcon", "phi3", "bamba")
SAID: dict[str, dict[str, Any]] = {"glm4_moe": {"head_dim": 128}}  # by its checkpoints
NOT_ADAPTED = ("mamba2", "nemotron_h")  # by peft, which refuses their output projections


def _unsavable(folder: Path, **values: Any) -> dict[str, Any]:
    (folder / "generation_config.json").write_text(json.dumps(values))
    with pytest.raises(ValueError, match="GenerationConfig is invalid"):  # transformers' own word on it
        transformers.GenerationConfig.from_pretrained(folder).save_pretrained(folder)
    return values


@pytest.mark.slow
@pytest.mark.parametrize("use_peft", [False, True])
def test_a_generation_config_that_transformers_would_not_save_is_kept_as_the_base_has_it(
    use_peft: bool, values: dict[str, Any], tmp_path: Path
) -> None:
    base = make_model(tmp_path / "base")
    written = _unsavable(base, do_sample=False, temperature=0.6, top_p=0.9, eos_token_id=make_tokenizer().eos_token_id)
    values["model"] = {"name_or_path": str(base), "use_peft": use_peft}
    run = make_run(tmp_path / "run", values)
    assert train(run, run / "training")["counted"]["updates"] == 4
    saved = run / "training" / "model"
    kept = json.loads((saved / "generation_config.json").read_text())
    # False is what transformers takes where nothing is written
    assert {name: kept.get(name, False) for name in written} == written
    transformers.AutoModelForCausalLM.from_pretrained(saved)


def _raises(*_: Any, **__: Any) -> None:
    raise ValueError("this cannot be written")


def _loses_a_change(save: Callable[..., None]) -> Callable[..., None]:
    def saved(model: Any, *others: Any) -> None:
        other = copy.deepcopy(model)
        with torch.no_grad():
            next(iter(other.parameters())).mul_(1.01)
        save(other, *others)

    return saved


def _loses_the_template(save: Callable[..., None]) -> Callable[..., None]:
    def saved(model: Any, tokenizer: Any, folder: Path, *others: Any) -> None:
        save(model, tokenizer, folder, *others)
        bare = make_tokenizer()
        bare.chat_template = "{{ messages[0].content }}"
        bare.save_pretrained(folder)

    return saved


def _leaves_weights_out(save: Callable[..., None]) -> Callable[..., None]:
    def saved(model: Any, tokenizer: Any, folder: Path, *others: Any) -> None:
        save(model, tokenizer, folder, *others)
        (folder / "model.safetensors").unlink()

    return saved


@pytest.mark.slow
@pytest.mark.parametrize(
    ("fault", "words"),
    [
        (lambda _: _raises, "could not be saved at the end: .* this cannot be written"),
        (_loses_a_change, "not what was trained: .* 1 weights are other ones, such as model.embed_tokens.weight"),
        (_loses_the_template, "its tokenizer has other tokens or another chat template"),
        (_leaves_weights_out, "it cannot be loaded again: .*no file named"),
    ],
    ids=["raises", "change", "template", "weights"],
)
def test_a_model_that_would_not_be_saved_as_it_was_trained_is_refused_before_the_first_update(
    fault: Any, words: str, values: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(end_rehearsal, "save_model", fault(end_rehearsal.save_model))
    run = make_run(tmp_path / "run", values)
    with pytest.raises(TrainingError, match=words):
        train(run, run / "training")
    assert not (run / "training" / "metrics.jsonl").exists()
    assert not (run / "training" / end_rehearsal.FOLDER).exists()


@pytest.mark.slow
@pytest.mark.parametrize(
    ("architecture", "use_peft"),
    [*((it, False) for it in ARCHITECTURES), *((it, True) for it in ARCHITECTURES if it not in NOT_ADAPTED)],
)
def test_architectures_of_any_size_are_tried_on_a_small_copy(architecture: str, use_peft: bool, tmp_path: Path) -> None:
    """The sizes are those that transformers gives a configuration of its own: of models with billions of weights."""
    transformers.AutoConfig.for_model(architecture, **SAID.get(architecture, {})).save_pretrained(tmp_path / "base")
    config: Any = SimpleNamespace(
        model=ModelConfig(name_or_path=str(tmp_path / "base"), use_peft=use_peft),
        train=SimpleNamespace(sharding="none"),
    )
    folder = tmp_path / "rehearsal"
    assert "was tried" in end_rehearsal._rehearse_saving(config, make_tokenizer(), folder)
    assert sum(file.stat().st_size for file in folder.rglob("*") if file.is_file()) < 64 * 2**20


def test_a_model_without_a_small_copy_is_trained_and_it_is_said_that_saving_was_not_tried(
    values: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(end_rehearsal, "LARGEST", 100)
    run = make_run(tmp_path / "run", values)
    assert train(run, run / "training")["counted"]["updates"] == 4
    assert "saving was not tried, since" in (said := capsys.readouterr().out) and "100 are the most" in said


def test_the_rehearsal_changes_nothing_that_is_drawn_later(
    values: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen = []

    def observed(*arguments: Any) -> None:
        before = torch.get_rng_state()
        rehearse_end(*arguments)
        seen.append(torch.equal(before, torch.get_rng_state()))

    monkeypatch.setattr(loop, "rehearse_end", observed)
    run = make_run(tmp_path / "run", values)
    train(run, run / "training")
    assert seen == [True]


@pytest.mark.slow
@pytest.mark.parametrize(
    "keys",
    [
        {"train": {"save_steps": 1, "save_total_limit": 2, "eval_steps": 2}},
        {"train": {"save_steps": 1, "save_total_limit": 1}, "model": {"use_peft": True}},
        {
            "train": {"save_steps": 1},
            "algorithm": {"beta": 0.1, "sync_ref_model": True},
            "teacher": {"template": "{prompt}{answer}", "update_rate": 0.1},
        },
    ],
    ids=["evaluated", "adapter", "reference and average"],
)
def test_the_disk_that_a_training_asks_for_is_what_it_comes_to_need(
    keys: dict[str, dict[str, Any]], values: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for section, own in keys.items():
        values[section] = values.get(section, {}) | own
    run, needed = make_run(tmp_path / "run", values), []

    def observed(config: Any, model: Any, plan: Any) -> int:
        needed.append(disk_needed(config, model, plan))
        return needed[0]

    monkeypatch.setattr(end_rehearsal, "disk_needed", observed)
    train(run, run / "training")
    written = [*(run / "training").rglob("*.pt"), *(run / "training").rglob("*.safetensors")]
    taken = sum(file.stat().st_size for file in written)
    assert 0.5 * needed[0] < taken < 1.05 * needed[0] + 200_000  # headers and states take more than these small weights


def test_a_training_that_its_disk_cannot_hold_is_refused_before_the_first_update(
    values: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = make_run(tmp_path / "run", with_keys(values))
    plan, config = load_plan(run / "plan.json"), load_config(run / "config.toml")
    assert plan.max_steps == 4 and config.train.save_steps > 4
    real = shutil.disk_usage(tmp_path)
    monkeypatch.setattr(shutil, "disk_usage", lambda _: real._replace(free=100_000))  # a disk cannot be made this full
    with pytest.raises(TrainingError, match=r"the disk has 0\.1 MiB left, and this training writes up to \d\.\d MiB"):
        train(run, run / "training")
    assert not (run / "training" / "metrics.jsonl").exists()
