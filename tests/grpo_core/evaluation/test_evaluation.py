"""Evaluation, in training and after it: each prompt once, as transformers answers it; the best model; the exact KL."""

from __future__ import annotations

import shutil
from collections import Counter
from pathlib import Path
from typing import Any

import polars as pl
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, AutoTokenizer

from grpo_core.config import memory_bounds
from grpo_core.config.files import parse_config
from grpo_core.data.prompts import Prompts
from grpo_core.evaluation.outcomes import unit_numbers
from grpo_core.evaluation.run import evaluate
from grpo_core.evaluation.samples import prompt_columns, samples_table
from grpo_core.model import divergence
from grpo_core.model.capabilities import plain_output_layer
from grpo_core.model.divergence import mean_kl
from grpo_core.model.loading import load_model
from grpo_core.planning.plan import load_plan
from grpo_core.rollout import transformers_engine as engine
from tasks.processes.training import check_result
from tasks.reports.report import verdicts
from tests.conftest import make_model, make_run, write_sums
from tests.grpo_core.training.training import checkpoint_of, metrics_of, result_of, trained_run, weights_of

SEEN: list[str] = []


def recorded(prompts: list[str], completions: list[str]) -> list[float | None]:
    SEEN.extend(prompts)
    return [-float(len(completion)) for completion in completions]


@pytest.mark.parametrize("teacher", [{}, {"template": "{answer}={prompt}"}], ids=["alone", "with privileged text"])
def test_evaluation_counts_each_held_out_prompt_once_at_its_steps_and_at_the_end(
    values: dict[str, Any], tmp_path: Path, teacher: dict[str, Any]
) -> None:
    """And asks what it says, whatever text a teacher reads."""
    SEEN.clear()
    values["teacher"] = teacher
    values["rewards"] = [{"function": "tests.grpo_core.evaluation.test_evaluation:recorded"}]
    run = trained_run(tmp_path / "run", values, eval_steps=3, max_steps=5)
    held_out = pq.read_table(run / "dataset" / "eval.parquet")["prompt"].to_pylist()
    counts = Counter(SEEN)
    assert {counts[prompt] for prompt in held_out} == {2}
    evaluated = [step for step in metrics_of(run) if "eval_reward" in step]
    assert [step["step"] for step in evaluated] == [3, 5]
    assert load_plan(run / "plan.json").evaluations == 2
    model = AutoModelForCausalLM.from_pretrained(run / "training" / "model").eval()
    assert evaluated[-1]["eval_reward"] == pytest.approx(_greedy_reward(model, run, held_out))
    for step in evaluated:
        scores = pl.read_parquet(run / "training" / "held_out" / f"step-{step['step']:06d}.parquet")
        assert scores["row"].to_list() == [*range(len(held_out))]
        assert scores["reward"].equals(scores["rewards/recorded"], check_names=False)
        assert scores["reward"].mean() == pytest.approx(step["eval_reward"])


@pytest.mark.slow
def test_the_reward_is_composed_alike_in_training_in_its_evaluations_and_after_it(
    values: dict[str, Any], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Records keep what the functions gave; every figure called reward is made of that by the configuration."""
    values["rewards"] = [
        {"function": "length", "name": "near", "args": {"target": 3}},
        {"function": "length", "name": "far", "args": {"target": 6}, "weight": 2.0},
        {"function": "tests.grpo_core.evaluation.test_evaluation:recorded", "clip": [-4, 0], "normalize": True},
    ]
    values["rewards"][1] |= {"gate": "near", "gate_threshold": 0.5}
    run = trained_run(tmp_path / "run", values, eval_steps=4)

    def reward(row: dict[str, Any]) -> float:
        near, far, recorded = row.values()
        return near + (2 * far if near >= 0.5 else 0) + (max(recorded, -4) + 4) / 4

    metrics = metrics_of(run)
    for rollout, file in enumerate(sorted((run / "training" / "completions").iterdir())):
        rows = pl.read_parquet(file).select("rewards/near", "rewards/far", "rewards/recorded").to_dicts()
        assert len({row["rewards/near"] for row in rows}) > 1, "some gates are open and some are closed"
        assert metrics[rollout]["reward"] == pytest.approx(sum(map(reward, rows)) / len(rows))
        open_ones = [row["rewards/far"] if row["rewards/near"] >= 0.5 else 0 for row in rows]
        assert metrics[rollout]["rewards/far/counted"] == pytest.approx(sum(open_ones) / len(rows))
        assert metrics[rollout]["rewards/far/mean"] == pytest.approx(pl.DataFrame(rows)["rewards/far"].mean())
    report = evaluate(run, run / "training")["sets"]["held-out"]["policies"]["trained"]
    assert (
        f", trained {report['reward']['mean']:.3f}" in capsys.readouterr().out.partition("reward on held-out: base ")[2]
    )
    samples = pl.read_parquet(run / "training" / "samples.parquet")
    rows = samples.select(f"trained/rewards/{name}" for name in ("near", "far", "recorded")).to_dicts()
    assert report["reward"]["mean"] == pytest.approx(sum(map(reward, rows)) / len(rows))
    assert metrics[-1]["eval_reward"] == pytest.approx(report["reward"]["mean"])


def _greedy_reward(model: Any, run: Path, prompts: list[str]) -> float:
    """Mean reward of greedy answers by transformers' own `generate`, one prompt at a time."""
    tokenizer = AutoTokenizer.from_pretrained(run / "training" / "model")
    lengths = []
    for prompt in prompts:
        ids = torch.tensor([tokenizer(prompt)["input_ids"]])
        answer = model.generate(ids, max_new_tokens=6, do_sample=False)[0, ids.shape[1] :]
        lengths.append(len(tokenizer.decode(answer, skip_special_tokens=True)))
    return -sum(lengths) / len(lengths)


@pytest.mark.slow
def test_evaluation_has_sampling_settings_of_its_own(values: dict[str, Any], tmp_path: Path) -> None:
    lengths = {}
    for name, evaluation in {"greedy": {}, "hot": {"temperature": 5.0}, "short": {"max_completion_length": 2}}.items():
        run = trained_run(tmp_path / name, {**values, "evaluation": evaluation}, eval_steps=4)
        lengths[name] = metrics_of(run)[-1]["eval_completions/mean_length"]
        training = [step["completions/mean_length"] for step in metrics_of(run)]
        assert training == [step["completions/mean_length"] for step in metrics_of(tmp_path / "greedy")]
    assert lengths["short"] <= 2
    assert lengths["hot"] != lengths["greedy"]


STEPS_OF_EVALUATION = [0.1, 0.9, 0.3, 0.3, 0.2]


def scripted(prompts: list[str], completion_ids: list[list[int]]) -> list[float | None]:
    """On held-out prompts a reward that rises and falls with the evaluations; on others one that trains."""
    if int(prompts[0].split("+")[0]) >= 60:
        SEEN.append("evaluation")
        return [STEPS_OF_EVALUATION[len(SEEN) - 1]] * len(prompts)
    return [float(sum(ids) % 5) for ids in completion_ids]


@pytest.mark.slow
def test_the_best_evaluated_model_is_handed_on_and_training_stops_when_patience_ends(
    values: dict[str, Any], tmp_path: Path
) -> None:
    SEEN.clear()
    values["rewards"] = [{"function": "tests.grpo_core.evaluation.test_evaluation:scripted"}]
    keys = {"eval_steps": 1, "load_best_model_at_end": True, "early_stopping_patience": 2, "max_steps": 9}
    run = trained_run(tmp_path / "run", values, **keys, save_steps=1, save_total_limit=9)
    result = result_of(run)
    assert (result["best_step"], result["best_value"]) == (2, pytest.approx(0.9))
    assert result["stopped_early_at_step"] == result["counted"]["updates"] == 4
    weights, best = weights_of(run), checkpoint_of(run, 2)["model"]
    assert all(torch.equal(weights[name], best[name]) for name in best)
    assert not all(torch.equal(weights[name], checkpoint_of(run, 3)["model"][name]) for name in best)
    check_result(result, run / "training" / "metrics.jsonl", load_plan(run / "plan.json"))


@pytest.mark.slow
def test_without_being_asked_the_last_model_is_handed_on(values: dict[str, Any], tmp_path: Path) -> None:
    SEEN.clear()
    values["rewards"] = [{"function": "tests.grpo_core.evaluation.test_evaluation:scripted"}]
    run = trained_run(tmp_path / "run", values, eval_steps=1, max_steps=4)
    result = result_of(run)
    assert (result["best_step"], result["stopped_early_at_step"]) == (2, None)
    best = load_file(run / "training" / "best" / "step-000002" / "weights.safetensors")
    assert not all(torch.equal(weights_of(run)[name], best[name]) for name in best)


def _perturbed(base: Path, folder: Path, size: float) -> Path:
    """The model with noise on its weights, as a folder of its own."""
    model = AutoModelForCausalLM.from_pretrained(base)
    torch.manual_seed(1)
    with torch.no_grad():
        for weights in model.parameters():
            weights += size * torch.randn_like(weights)
    model.save_pretrained(folder)
    AutoTokenizer.from_pretrained(base).save_pretrained(folder)
    return folder


def _evaluated(folder: Path, values: dict[str, Any], **evaluation: Any) -> Path:
    """A run ready to be evaluated, on the sets `held-out` and `hard`; the latter has categories."""
    sets = [{"name": "hard", "data": "hard.parquet"}]
    run = make_run(folder, {**values, "evaluation": {"sets": sets, **evaluation}})
    hard = pq.read_table(write_sums(run / "dataset" / "eval-hard.parquet", 80, 87))
    kinds = pa.array(["odd" if row % 2 else "even" for row in range(len(hard))])
    pq.write_table(hard.append_column("category", kinds), run / "dataset" / "eval-hard.parquet")
    _perturbed(Path(values["model"]["name_or_path"]), run / "training" / "model", 0.05)
    (run / "evaluation").mkdir()
    return run


@pytest.mark.slow
def test_each_prompt_of_each_set_is_answered_once_a_sample_by_each_policy_whatever_the_batch(
    values: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    values["rewards"] = [{"function": "tests.grpo_core.evaluation.test_evaluation:recorded"}]
    run = _evaluated(tmp_path / "run", values, num_samples=3, temperature=1.0)
    champion = _perturbed(Path(values["model"]["name_or_path"]), tmp_path / "champion", 0.02)
    SEEN.clear()
    report = evaluate(run, run / "evaluation", champion)
    assert {*Counter(SEEN).values()} == {3 * len(report["policies"])}
    samples = pl.read_parquet(run / "evaluation" / "samples.parquet")
    for name, file in {"held-out": "eval", "hard": "eval-hard"}.items():
        asked = pq.read_table(run / "dataset" / f"{file}.parquet").to_pydict()
        rows = samples.filter(set=name)
        assert rows.select("row", "sample").rows() == [(r, s) for r in range(len(asked["prompt"])) for s in range(3)]
        for column in ("prompt", "answer", *(["category"] if name == "hard" else [])):
            assert rows.filter(sample=0)[column].to_list() == asked[column]
    assert report["policies"] == ["base", "champion", "trained"]
    assert [*report["sets"]["hard"]["categories"]] == ["even", "odd"]
    assert len(samples["trained/completion"].unique()) > len(samples.filter(sample=0))
    assert (samples["base/completion"] != samples["trained/completion"]).any()

    SEEN.clear()
    (tmp_path / "taken").mkdir()
    taken = evaluate(run, tmp_path / "taken", None, run / "evaluation" / "samples.parquet", ["base", "champion"])
    assert {*Counter(SEEN).values()} == {3}, "only the trained policy is asked"
    assert pl.read_parquet(tmp_path / "taken" / "samples.parquet").equals(samples)
    assert {**taken, "start_seconds": 0} == {**report, "start_seconds": 0}

    monkeypatch.setattr(engine, "MAX_ROWS", 5)
    (tmp_path / "again").mkdir()
    again = evaluate(run, tmp_path / "again", champion)
    others = pl.read_parquet(tmp_path / "again" / "samples.parquet")
    distances = [column for column in samples.columns if column.endswith("/kl")]
    assert others.drop(distances).equals(samples.drop(distances))
    for column in distances:
        assert others[column].to_list() == pytest.approx(samples[column].to_list(), rel=1e-3)
    assert again["key"] == report["key"]


@pytest.mark.slow
def test_the_gain_of_a_warm_start_is_told_from_that_of_the_training_after_it(
    values: dict[str, Any], tmp_path: Path
) -> None:
    values |= {"warm_start": {"demonstrations": "shown.parquet"}, "rewards": [{"function": f"{__name__}:recorded"}]}
    run, base = _evaluated(tmp_path / "run", values), Path(values["model"]["name_or_path"])
    _perturbed(base, run / "warm-start" / "model", 0.2)
    report = evaluate(run, run / "evaluation")
    assert report["policies"] == ["base", "warm-start", "trained"]
    shutil.rmtree(run / "training" / "model")
    shutil.copytree(run / "warm-start" / "model", run / "training" / "model")
    (tmp_path / "other").mkdir()
    other = evaluate(run, tmp_path / "other")
    for name, found in report["sets"].items():
        assert found["warm_start"] == other["sets"][name]["warm_start"] == other["sets"][name]["differences"]["base"]
        assert found["warm_start"]["reward"] != found["differences"]["base"]["reward"]
        assert other["sets"][name]["differences"]["warm-start"]["reward"]["mean"] == 0
    [gain] = [it for it in verdicts(report, "reward") if it.startswith("held-out, the warm start by itself: ")]
    assert "base" in gain


@pytest.mark.slow
def test_greedy_answers_are_transformers_own_and_the_key_tells_what_else_they_follow_from(
    values: dict[str, Any], tmp_path: Path
) -> None:
    run = _evaluated(tmp_path / "run", values)
    report = evaluate(run, run / "evaluation")
    assert report["policies"] == ["base", "trained"]
    samples = pl.read_parquet(run / "evaluation" / "samples.parquet").filter(set="hard")
    for policy, folder in (("base", values["model"]["name_or_path"]), ("trained", run / "training" / "model")):
        model, tokenizer = AutoModelForCausalLM.from_pretrained(folder), AutoTokenizer.from_pretrained(folder)
        for prompt, completion in samples.select("prompt", f"{policy}/completion").rows():
            ids = torch.tensor([tokenizer(prompt)["input_ids"]])
            answer = model.generate(ids, max_new_tokens=6, do_sample=False)[0, ids.shape[1] :]
            assert completion == tokenizer.decode(answer, skip_special_tokens=True)
    keys = {report["key"]}
    for name, evaluation in {"seeded": {}, "longer": {"max_completion_length": 7}}.items():
        other = _evaluated(tmp_path / name, {**values, "seed": 1 if name == "seeded" else 0}, **evaluation)
        keys.add(evaluate(other, other / "evaluation")["key"])
    assert len(keys) == 2, "another seed changes no pairs"


@pytest.mark.slow
def test_a_champion_that_the_engine_cannot_take_over_is_left_out(
    values: dict[str, Any], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = _evaluated(tmp_path / "run", values)
    other = make_model(tmp_path / "wider", hidden_size=32)
    (other / "model.safetensors").unlink()  # not even read: on several GPUs it might not fit, or not be sharded
    report = evaluate(run, run / "evaluation", other)
    assert (report["policies"], report["champion"]) == (["base", "trained"], None)
    assert "the champion is left out: it has another architecture" in capsys.readouterr().out


ARCHITECTURES = {"Qwen2": {}, "Gemma2": {"head_dim": 32, "final_logit_softcapping": 2.0}}


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_the_kl_is_that_of_the_full_distributions_at_the_policy_s_own_states(
    architecture: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    base_folder = make_model(tmp_path / "base", architecture, **ARCHITECTURES[architecture])
    base = load_model(base_folder)
    policy = load_model(_perturbed(base_folder, tmp_path / "policy", 0.05))
    assert (plain_output_layer(base) is None) == (architecture == "Gemma2"), "logits are made in either way"
    monkeypatch.setattr(divergence, "TOKENS", 20)  # several batches
    monkeypatch.setattr(memory_bounds, "CHUNK_LOGITS", 50)  # several chunks in each
    torch.manual_seed(0)
    prompts = [torch.randint(0, 12, (length,)).tolist() for length in (3, 9, 1, 4, 30)]
    completions = [torch.randint(0, 12, (length,)).tolist() for length in (5, 1, 7, 2, 6)]
    masks = [None, [1], [1, 0, 0, 1, 1, 0, 1], [0, 0], [0] * 5 + [1]]  # 0: said by an environment
    found = mean_kl(policy, base, prompts, completions, masks)
    policy, base = policy.double(), base.double()
    for prompt, completion, mask, value in zip(prompts, completions, masks, found, strict=True):
        ids = torch.tensor([prompt + completion])
        with torch.no_grad():
            p, q = (m(input_ids=ids).logits[0, len(prompt) - 1 : -1].softmax(-1) for m in (policy, base))
        each = (p * (p / q).log()).sum(-1)
        kept = each if mask is None else each[torch.tensor(mask) == 1]
        expected = kept.mean().item() if len(kept) else 0.0
        assert value == pytest.approx(expected, rel=1e-4)
        assert expected > 0.01 or not len(kept)


@pytest.mark.parametrize(
    ("environment", "numbers"),
    [({"environment_factory": "textarena"}, [0, 1, 0]), ({"tools": ["calculator"]}, [0] * 3)],
)
def test_rows_of_an_environment_are_told_apart_by_all_that_it_begins_with(
    values: dict[str, Any], environment: dict[str, Any], numbers: list[int]
) -> None:
    config = parse_config({**values, "environment": environment})
    rows = [{"prompt": [{"role": "user", "content": "Play."}], "seed": seed} for seed in (3, 4, 3)]
    table = samples_table(prompt_columns("held-out", Prompts(rows, [], 1), config), [])
    assert unit_numbers(table, "held-out").tolist() == numbers


def test_samples_of_sets_whose_columns_differ_make_one_table(values: dict[str, Any]) -> None:
    config = parse_config({**values, "evaluation": {"num_samples": 2, "temperature": 1.0, "category_column": "kind"}})
    user = {"role": "user", "content": "1+1="}
    sets = {
        "held-out": [{"prompt": [{**user, "name": None}], "answer": 2, "kind": None}],
        "hard": [{"prompt": [user], "answer": "two", "kind": "words"}, {"prompt": [user], "answer": None, "kind": "x"}],
        "plain": [{"prompt": [user]}],
    }
    table = pl.concat(
        [samples_table(prompt_columns(name, Prompts(rows, [], 1), config), []) for name, rows in sets.items()],
        how="diagonal",
    )
    assert table["set"].to_list() == ["held-out"] * 2 + ["hard"] * 4 + ["plain"] * 2
    assert table["row"].to_list() == [0, 0, 0, 0, 1, 1, 0, 0]
    assert table["sample"].to_list() == [0, 1] * 4
    assert table["prompt"].to_list() == [[user]] * 8
    assert table["answer"].to_list() == ["2", "2", "two", "two", None, None, None, None]
    assert table["category"].to_list() == [None, None, "words", "words", "x", "x", None, None]
