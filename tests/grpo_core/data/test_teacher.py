"""What is refused of a teacher before any weights are loaded, what a plan counts of it, and what a run knows it by."""

from __future__ import annotations

import json
import os
import re
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer

from flows.parameters.early_refusals import refuse_early
from grpo_core.config.files import parse_config
from grpo_core.config.run import RunConfig
from grpo_core.config.teacher import loaded_teachers, source_teachers
from grpo_core.data.prompts import check_teacher_tokenizer
from grpo_core.data.teacher import check_teacher, check_tokenizers, silent_notes, teacher_notes, unseen_notes
from grpo_core.errors import ConfigError
from grpo_core.planning.hardware import Gpu, named_gpu
from grpo_core.planning.memory import GIB, check_teacher_memory, peak_memory
from grpo_core.planning.plan import Plan, PlanError, make_plan, plan_inputs
from grpo_core.planning.shapes import ModelShape, PromptLengths
from grpo_core.planning.wall_time import wall_time
from tasks.stages.lineage import lineage_keys
from tests.conftest import config_values, make_model, with_keys
from tests.grpo_core.planning.test_forecast import PACE, plan_of
from tests.qwen import planned, qwen
from tests.sources import two_sources

LENGTHS = PromptLengths(140, 220, "given")


def taught(values: dict[str, Any], teacher: Path | str, **keys: Any) -> RunConfig:
    return parse_config({**values, "teacher": {"model": str(teacher), **keys}})


def by_source(model: Path, folder: Path, teacher: Path | str, lines: Path | str | None, **keys: Any) -> dict[str, Any]:
    """Sums, which `teacher` teaches, and lines, which another may teach."""
    values = two_sources(model, folder) | {"teacher": {"model": str(teacher), **keys}}
    values["data"]["sources"][1] |= {} if lines is None else {"teacher": str(lines)}
    return values


def changed(model: Path, folder: Path, file: str, **values: Any) -> Path:
    """A copy of a model whose JSON file says something else."""
    shutil.copytree(model, folder)
    (folder / file).write_text(json.dumps({**json.loads((folder / file).read_text()), **values}))
    return folder


def test_another_tokenizer_is_refused_with_the_first_ids_that_differ(
    values: dict[str, Any], model_folder: Path, tmp_path: Path
) -> None:
    other = shutil.copytree(model_folder, tmp_path / "other")
    tokenizer = json.loads((other / "tokenizer.json").read_text())
    vocab = tokenizer["model"]["vocab"]
    first, second = sorted(vocab, key=vocab.get)[5:7]
    vocab[first], vocab[second] = vocab[second], vocab[first]
    (other / "tokenizer.json").write_text(json.dumps(tokenizer))
    config = taught(values, other)
    for name in ("train", "eval"):
        (tmp_path / f"{name}.parquet").write_bytes(b"")
    for check in (refuse_early, check_teacher_tokenizer):  # by its file, and as it is loaded
        with pytest.raises(ConfigError, match="tokenizer is not that of"):
            check(config)
    with pytest.raises(ConfigError, match="ids differ") as caught:
        check_teacher(config)
    assert f"5 is {first!r} and {second!r}; 6 is {second!r} and {first!r})" in str(caught.value)
    config = parse_config(by_source(model_folder, tmp_path, model_folder, other))
    for check in (refuse_early, check_teacher_tokenizer):
        with pytest.raises(ConfigError, match=re.escape(f"data.sources.1.teacher = {str(other)!r}: its tokenizer is")):
            check(config)


def test_a_teacher_may_know_more_tokens_and_none_fewer(values: dict[str, Any]) -> None:
    config, few, more = taught(values, "teacher"), {"a": 0, "b": 1}, {"a": 0, "b": 1, "c": 2}
    check_tokenizers(config, "teacher", few, more)
    with pytest.raises(ConfigError, match=r"1 of 3 ids differ \(2 is 'c' and absent\)"):
        check_tokenizers(config, "teacher", more, few)


@pytest.mark.parametrize(
    ("says", "sentence"),
    [
        ({"vocab_size": 3}, "its embedding has 3 rows"),
        ({"max_position_embeddings": 7}, "it takes 7 tokens, and the longest prompt plus completion has 8"),
        ({"quantization_config": {"quant_method": "fp8"}}, "its weights are quantised"),
    ],
)
def test_a_teacher_whose_config_rules_it_out_is_refused(
    values: dict[str, Any], model_folder: Path, tmp_path: Path, says: dict[str, Any], sentence: str
) -> None:
    config = taught(values, changed(model_folder, tmp_path / "other", "config.json", **says))
    with pytest.raises(ConfigError, match=re.escape(f"teacher.model = {config.teacher.model!r}: {sentence}")):
        check_teacher(config, 8)
    config = parse_config(by_source(model_folder, tmp_path, model_folder, tmp_path / "other"))
    named = f"data.sources.1.teacher = {str(tmp_path / 'other')!r}: {sentence}"
    with pytest.raises(ConfigError, match=re.escape(named)):
        check_teacher(config, 8)


TEMPLATE = "{prompt}{answer}"


@pytest.mark.parametrize(
    ("teacher", "named", "sentence"),
    [
        (
            {"model": "m", "url": "http://a:1"},
            "b",
            "'b' with teacher.url='http://a:1': the teachers of sources",
        ),
        ({"model": "m", "template": TEMPLATE}, "", "'' with teacher.template='{prompt}{answer}': the teachers"),
        ({"model": "m"}, "self", "'self': a policy that teaches itself is for all sources (teacher.template)"),
        ({}, "b", "'b' without teacher.model, the teacher of the sources that name none; set it, and teacher = ''"),
    ],
)
def test_teachers_of_sources_are_refused_with_keys_that_they_do_not_share(
    tmp_path: Path, teacher: dict[str, Any], named: str, sentence: str
) -> None:
    values = {**by_source(tmp_path / "model", tmp_path, "m", named), "teacher": teacher}
    with pytest.raises(ConfigError, match=re.escape(f"data.sources.1.teacher={sentence}")):
        parse_config(values)


def test_a_teacher_without_a_source_and_a_source_from_which_nothing_is_learnt_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"data\.sources\.1\.teacher = '/gone': no such file or folder"):
        refuse_early(parse_config(by_source(make_model(tmp_path / "model"), tmp_path, tmp_path / "model", "/gone")))
    values = by_source(tmp_path / "model", tmp_path, "m", "")
    parse_config(values)
    values["data"]["sources"][0]["teacher"] = ""
    with pytest.raises(ConfigError, match=r"teacher\.model='m' teaches no source: each of data\.sources names another"):
        parse_config(values)
    values["data"]["sources"][0].pop("teacher")
    values["rewards"] = [{**it, "weight": float(it["function"] != "length")} for it in values["rewards"]]
    with pytest.raises(ConfigError, match=r"data\.sources\.1\.teacher='', and no reward of 'lines' has a weight"):
        parse_config(values)


def test_a_teacher_that_is_nowhere_and_keys_that_do_not_go_with_one_are_refused(
    values: dict[str, Any], model_folder: Path
) -> None:
    with pytest.raises(ConfigError, match=r"teacher\.model = '/gone': no such file or folder"):
        refuse_early(taught(values, "/gone"))
    with pytest.raises(ConfigError, match="the teacher teaches there; remove one of the two"):
        taught({**values, "rollout": {**values["rollout"], "dynamic_sample": True}}, model_folder)
    with pytest.raises(ConfigError, match=r"weight=0\.5 is for a teacher; set model, url or template, or remove it"):
        parse_config({**values, "teacher": {"weight": 0.5}})
    with pytest.raises(ConfigError, match=r"divergence_beta=1\.0 is for a teacher; set model, url or temp"):
        parse_config({**values, "teacher": {"divergence_beta": 1.0}})
    with pytest.raises(ConfigError, match="divergence_top_k=5 is for a divergence; set divergence_beta, or remove it"):
        taught(values, model_folder, divergence_top_k=5)
    for beta in (-0.1, 1.1):
        with pytest.raises(ConfigError, match=r"teacher\.divergence_beta"):
            taught(values, model_folder, divergence_beta=beta)
    rows = json.loads((model_folder / "config.json").read_text())["vocab_size"]
    check_teacher(taught(values, model_folder, divergence_beta=1.0, divergence_top_k=rows - 1))
    with pytest.raises(ConfigError, match=f"the vocabulary has {rows} tokens; take fewer, or 0 for all"):
        check_teacher(taught(values, model_folder, divergence_beta=1.0, divergence_top_k=rows))
    keys = {"template": "{prompt}!", "divergence_beta": 1.0, "divergence_top_k": rows}
    with pytest.raises(ConfigError, match=f"the vocabulary has {rows} tokens; take fewer, or 0 for all"):
        check_teacher(parse_config({**values, "teacher": keys}))  # the policy itself teaches


def test_a_group_may_have_one_completion_only_where_a_teacher_teaches_alone(
    values: dict[str, Any], model_folder: Path
) -> None:
    values["rollout"]["num_generations"] = 1
    unpaid = {**values, "rewards": [{**reward, "weight": 0.0} for reward in values["rewards"]]}
    for refused in (parse_config(unpaid), taught(values, model_folder)):
        with pytest.raises(PlanError, match="num_generations=1 leaves nothing to compare"):
            make_plan(plan_inputs(refused, 24))
    assert make_plan(plan_inputs(taught(unpaid, model_folder), 24)).num_generations == 1


def _products(shape: ModelShape, plan: Plan) -> float:
    """Products of the layers with a group's prompt and completions, and of the head with its completions."""
    completions = plan.num_generations * PACE.completion_tokens
    layers = shape.parameters - shape.outside
    return layers * (LENGTHS.mean + completions) + shape.vocabulary * shape.hidden * completions


def test_the_forecast_counts_a_teachers_weights_and_passes_and_refuses_what_has_no_room() -> None:
    """7B beside 1.5B: its weights take 15.2 GB in bf16, and its pass as long as 7.07/1.54 of the policy's."""
    values = config_values(Path("model"), Path("data"), mixed_precision="bf16", engine="transformers", max_steps=10)
    alone, config = parse_config(values), taught(values, "teacher")
    gpu, seven = named_gpu("H200"), qwen("7B")
    run = planned(config, "1.5B", LENGTHS, gpu, seven)
    without, found = (peak_memory(it) for it in (planned(alone, "1.5B", LENGTHS, gpu), run))
    assert found["parts_gib"]["teacher"] * GIB == 2 * seven.parameters
    assert found["peak_memory_gib"] - without["peak_memory_gib"] >= found["parts_gib"]["teacher"] - 1e-9
    check_teacher_memory(run)
    with pytest.raises(ConfigError, match=r"its weights are 14\.2 GiB per GPU"):
        check_teacher_memory(planned(config, "1.5B", LENGTHS, Gpu("GPU", 24.0), seven))
    plan, policy = plan_of(config), qwen("1.5B")
    hours = [
        wall_time(config, plan, LENGTHS, PACE, policy, None, it)["parts_hours"]["updates"] for it in ({}, run.teachers)
    ]
    micro_steps = plan.rollouts * plan.steps_per_generation
    passes = (hours[1] - hours[0]) * 3600 / (micro_steps * PACE.train_seconds / 3)
    assert passes == pytest.approx(_products(seven, plan) / _products(policy, plan))
    compared = taught(values, "teacher", divergence_beta=0.5)
    small = planned(compared, "1.5B", LENGTHS, gpu, qwen("0.5B"))
    with pytest.raises(ConfigError, match="its logits are not those of a linear layer alone; remove it"):
        check_teacher_memory(replace(small, shape=replace(policy, own_logits=True)))


def test_the_forecast_counts_the_weights_of_all_teachers_and_the_passes_of_each_over_its_sources(
    tmp_path: Path,
) -> None:
    """7B teaches the 20,000 sums of an epoch; its lines, half of them all, have 3B as teacher, or none."""
    keys = {"engine": "transformers", "max_steps": 10}
    policy, seven, three = qwen("1.5B"), qwen("7B"), qwen("3B")
    for lines, teachers in (("3B", {"7B": seven, "3B": three}), ("", {"7B": seven}), ("7B", {"7B": seven})):
        values = by_source(tmp_path / "model", tmp_path, "7B", lines)
        config = parse_config(with_keys(values, mixed_precision="bf16", **keys))
        run = planned(config, policy, LENGTHS, named_gpu("H200"), *teachers.values())
        assert peak_memory(run)["parts_gib"]["teacher"] * GIB == 2 * sum(it.parameters for it in teachers.values())
        hours = [
            wall_time(config, run.plan, LENGTHS, PACE, policy, None, it)["parts_hours"]["updates"]
            for it in ({}, teachers)
        ]
        micro_steps = run.plan.rollouts * run.plan.steps_per_generation
        passes = (hours[1] - hours[0]) * 3600 / (micro_steps * PACE.train_seconds / 3)
        found = {"": 0.0} | {name: _products(it, run.plan) for name, it in (("7B", seven), ("3B", three))}
        assert passes == pytest.approx((2 * found["7B"] + found[lines]) / 3 / _products(policy, run.plan))
        if lines == "3B":  # 14.2 and 5.7 GiB
            with pytest.raises(ConfigError, match=r"'7B', data\.sources\.1\.teacher = '3B': their weights are 19\.9 "):
                check_teacher_memory(replace(run, gpu=Gpu("GPU", 24.0)))


def test_a_plan_says_that_groups_will_be_silent_and_where_a_teacher_teaches(
    values: dict[str, Any], model_folder: Path, tmp_path: Path
) -> None:
    """G = 4: below a pass rate of 1/8."""
    alone = parse_config(values)
    assert silent_notes(alone, [0.0, 0.25]) == [] == silent_notes(alone, [])
    (said,) = silent_notes(alone, [0.0, 0.2])
    # (1 + 0.8⁴ + 0.2⁴) / 2 of the groups.
    assert "10.00%, below 1 / (2·num_generations) = 12.50%: by the rewards, about 71% of the groups" in said
    assert "[teacher] model" in said and "[warm_start] demonstrations" in said
    (said,) = silent_notes(parse_config({**values, "warm_start": {"demonstrations": "shown.jsonl"}}), [0.0])
    assert said.endswith("that was the base; the warm start teaches there first")
    (said,) = silent_notes(parse_config(by_source(model_folder, tmp_path, model_folder, "")), [0.0])
    assert said.endswith("alike; the teacher teaches there, except in lines")
    (said,) = silent_notes(taught(values, model_folder), [0.0])
    assert said.endswith("about 100% of the groups will be silent, all their completions failing alike; the teacher "
                         "teaches there")  # fmt: skip


@pytest.mark.parametrize(
    ("keys", "said"),
    [
        (
            {"model": "m"},
            "the policy is taught by teacher.model = 'm': by each token's advantage, weight 1; the rewards count too",
        ),
        (
            {"url": "http://10.0.0.5:8000", "model": "m", "weight": 0.5},
            "the policy is taught by the server teacher.url = 'http://10.0.0.5:8000' with 'm': by each token's "
            "advantage, weight 0.5; the rewards count too",
        ),
        (
            {"template": "{prompt} {answer}"},
            "the policy is taught by itself, which reads teacher.template: by each token's advantage, weight 1; the "
            "rewards count too",
        ),
        (
            {"template": "{prompt} {answer}", "update_rate": 0.05, "divergence_beta": 1.0},
            "the policy is taught by its own moving average, teacher.update_rate = 0.05, which reads "
            "teacher.template: by a divergence, divergence_beta = 1, weight 1; the rewards count too",
        ),
    ],
)
def test_a_plan_says_what_teaches(values: dict[str, Any], keys: dict[str, Any], said: str) -> None:
    assert teacher_notes(parse_config(values)) == []
    assert teacher_notes(parse_config({**values, "teacher": keys})) == [said]
    alone = {**values, "rewards": [{**reward, "weight": 0.0} for reward in values["rewards"]], "teacher": keys}
    assert teacher_notes(parse_config(alone))[0].endswith("; no reward counts")


def test_a_plan_says_that_a_teacher_ends_its_answers_otherwise(
    values: dict[str, Any], model_folder: Path, tmp_path: Path
) -> None:
    own = json.loads((model_folder / "config.json").read_text())["eos_token_id"]
    text = Tokenizer.from_file(str(model_folder / "tokenizer.json")).id_to_token
    alike = shutil.copytree(model_folder, tmp_path / "alike")
    (alike / "generation_config.json").write_text(json.dumps({"eos_token_id": [own]}))
    other = shutil.copytree(model_folder, tmp_path / "other")
    (other / "generation_config.json").write_text(json.dumps({"eos_token_id": [5, own]}))
    assert len(teacher_notes(taught(values, alike))) == len(teacher_notes(taught(values, "7B"))) == 1
    _, said = teacher_notes(taught(values, other))
    ends = " or ".join(repr(text(it)) for it in sorted([5, own]))
    assert said.startswith(
        f"teacher.model = {str(other)!r} ends an answer with {ends}, and the policy with {text(own)!r}: "
    )


def test_a_plan_names_the_teachers_of_sources_and_those_that_have_none(model_folder: Path, tmp_path: Path) -> None:
    (said,) = teacher_notes(parse_config(by_source(model_folder, tmp_path, "7B", "")))
    assert said.startswith("the policy is taught by teacher.model = '7B': ")
    assert said.endswith("; the rewards count too, and alone in lines")


def test_a_plan_says_that_nothing_teaches_and_which_teacher_it_has_not_seen(
    values: dict[str, Any], model_folder: Path
) -> None:
    values["rewards"] = [{**reward, "weight": 0.0} for reward in values["rewards"]]
    (said,) = silent_notes(parse_config(values), [])
    assert said.endswith("there is no [teacher]: GRPO trains nothing; give a reward a weight")
    assert silent_notes(taught(values, model_folder), []) == [] == unseen_notes(taught(values, model_folder))
    (said,) = unseen_notes(taught(values, "Qwen/Qwen2.5-7B-Instruct"))
    assert said.startswith("teacher.model = 'Qwen/Qwen2.5-7B-Instruct' is not on this machine")


def test_a_run_is_known_by_its_teachers_content_and_weight_and_not_by_its_name(
    values: dict[str, Any], model_folder: Path, tmp_path: Path
) -> None:
    for name in ("train", "eval"):
        (tmp_path / f"{name}.parquet").write_bytes(b"")
    values["data"] = {name: str(tmp_path / f"{name}.parquet") for name in ("train", "eval")}
    teacher = make_model(tmp_path / "teacher", hidden_size=32)
    same, other = (tmp_path / "same", make_model(tmp_path / "other", hidden_size=48))
    shutil.copytree(teacher, same)
    first = lineage_keys(taught(values, teacher))
    assert lineage_keys(taught(values, same)) == first
    for config in (taught(values, other), taught(values, teacher, weight=0.5), parse_config(values)):
        found = lineage_keys(config)
        assert {name for name in first if found[name] != first[name]} >= {"train", "evaluate", "register"}
        assert found["validate"] == first["validate"]
    alone = lineage_keys(parse_config(by_source(model_folder, tmp_path, teacher, None)))
    assert lineage_keys(parse_config(by_source(model_folder, tmp_path, teacher, teacher))) == alone
    for spelled in (os.path.relpath(teacher), f"{other}/../{teacher.name}/"):
        again = by_source(model_folder, tmp_path, teacher, spelled)
        again["data"]["sources"][0]["teacher"] = f"{teacher}/"  # so that no source names teacher.model as it is there
        config = parse_config(again)
        assert lineage_keys(config) == alone
        assert {key: it.name_or_path for key, it in loaded_teachers(config).items()} == {"teacher.model": str(teacher)}
        assert {*source_teachers(config).values()} == {str(teacher)}
    first = lineage_keys(parse_config(by_source(model_folder, tmp_path, teacher, other)))
    copy = shutil.copytree(other, tmp_path / "copy")
    assert lineage_keys(parse_config(by_source(model_folder, tmp_path, same, copy))) == first
    for lines in (None, "", model_folder):
        found = lineage_keys(parse_config(by_source(model_folder, tmp_path, teacher, lines)))
        assert {name for name in first if found[name] != first[name]} >= {"plan", "train", "evaluate", "register"}
        assert found["validate"] == first["validate"]
