"""What a teacher reads in the place of a prompt, which completions it then teaches, and what is refused of a template
before any weights are loaded."""

from __future__ import annotations

import math
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import polars as pl
import pytest

from grpo_core.config.files import parse_config
from grpo_core.config.run import RunConfig
from grpo_core.data.privileged import shown_prompt
from grpo_core.environments.conversation import Said
from grpo_core.errors import ConfigError
from grpo_core.planning.hardware import Gpu, named_gpu
from grpo_core.planning.memory import GIB, check_teacher_memory, peak_memory
from grpo_core.planning.plan import make_plan, plan_inputs
from grpo_core.planning.shapes import PromptLengths, adapter_parameters
from grpo_core.planning.wall_time import wall_time
from grpo_core.rollout import privileged
from grpo_core.rollout.collect import Sample
from grpo_core.rollout.privileged import Privileged, Shown
from grpo_core.rollout.types import Completion
from tasks.data.lengths import ModelError
from tasks.stages.lineage import lineage_keys
from tests.conftest import config_values, make_model
from tests.grpo_core.planning.test_forecast import PACE, plan_of
from tests.grpo_core.training.plain_training import shown_prompts
from tests.grpo_core.training.training import metrics_of, trained_run
from tests.qwen import planned, qwen
from tests.rows import screen

TALK = [
    {"role": "system", "content": "Answer."},
    {"role": "user", "content": "1+1?"},
    {"role": "assistant", "content": "{2}"},
    {"role": "user", "content": "And 2+2?"},
]


def told(values: dict[str, Any], template: str, **keys: Any) -> RunConfig:
    return parse_config({**values, "teacher": {"template": template, **keys}})


def shown_of(config: RunConfig, samples: list[Sample], prompts: list[Any], room: int = 10**9) -> list[Any]:
    """The prompts that the template makes."""
    made: list[Any] = []

    def encode(shown: Any) -> list[list[int]]:
        made.extend(shown)
        return [[place] for place, _ in enumerate(made)]

    rows = [{"prompt": prompt} for prompt in prompts]
    found = privileged.shown_prompts(Privileged(config, encode, room), samples, rows)
    return [None if ids is None else made[ids[0]][0] for ids in found]


def sampled(row: int, text: str, *rewards: float, said: Said | None = None) -> Sample:
    return Sample(row, [1], Completion([1, 2], [0.0, 0.0], truncated=False), text, [*rewards], said)


def test_the_prompts_of_sdft_are_those_that_trl_composes() -> None:
    """As TRL 1.16's `DemonstrationTeacherContextBuilder` made them, with its default template."""
    template = "{prompt}\n\n{privileged_context}"
    assert shown_prompt(template, {"prompt": "2+2=", "privileged_context": "4"}, {}) == "2+2=\n\n4"
    row = {"prompt": TALK, "privileged_context": "{4}, or four"}
    assert shown_prompt(template, row, {}) == [*TALK[:3], {"role": "user", "content": "And 2+2?\n\n{4}, or four"}]


def test_the_prompts_of_sdpo_are_those_that_trl_composes(values: dict[str, Any]) -> None:
    """As TRL 1.16's `SuccessfulRolloutTeacherContextBuilder` made them, with its default templates in one: of a group
    with one right answer, and of one with none. The right answer itself, and what has nothing to learn from, is not
    taught: TRL masks it."""
    template = "{prompt}\nCorrect solution:\n\n{better}\n\n\n\nCorrectly solve the original question.\n"
    said = "And 2+2?\nCorrect solution:\n\nis 4\n\n\n\nCorrectly solve the original question.\n"
    shown = [*TALK[:3], {"role": "user", "content": said}]
    values["rewards"] = values["rewards"][:1]
    right = [sampled(0, f"is {n}", float(n == 4)) for n in (5, 4, 6, 7)]
    wrong = [sampled(1, f"is {n}", 0.0) for n in (1, 2, 3, 0)]
    found = shown_of(told(values, template), right + wrong, [TALK, "2+2="])
    assert found == [shown, None, shown, shown, None, None, None, None]


def test_a_better_attempt_has_a_higher_reward_and_the_first_of_the_best_is_shown(values: dict[str, Any]) -> None:
    config, nan = told(values, "{prompt}{better}"), math.nan  # weights 1 and 0.5
    group = [sampled(0, "a", 0.0, 1.0), sampled(0, "b", 1.0, 0.0), sampled(0, "c", 1.0, nan), sampled(0, "d", nan, nan)]
    assert shown_of(config, group, ["?"]) == ["?b", None, None, None]
    assert shown_of(config, group[3:] * 4, ["?"]) == [None] * 4
    unpaid = [{**reward, "weight": 0.0} for reward in values["rewards"]]
    alone = told({**values, "rewards": unpaid}, "{prompt}{better}")  # then each reward counts alike
    group = [sampled(0, "a", 0.0, 1.0), sampled(0, "b", 1.0, 0.5), sampled(0, "", 1.0, 1.0), sampled(0, "d", 0.0, 0.0)]
    assert shown_of(alone, group, ["?"]) == [None] * 4, "the best has said nothing"
    assert shown_of(alone, [*group[:2], *group[:2]], ["?"]) == ["?b", None, "?b", None]
    values["rewards"][1]["weight"] = 0.0  # a source whose only reward is that one
    other = [sampled(0, text, nan, reward) for text, reward in (("a", 0.0), ("b", 1.0), ("c", 1.0), ("d", nan))]
    assert shown_of(told(values, "{prompt}{better}"), [*group, *other], ["?"])[4:] == ["?b", None, None, None]


def test_what_does_not_fit_is_not_shown(values: dict[str, Any]) -> None:
    group = [sampled(0, text, float(text == "b")) for text in "abcd"]
    values["rewards"] = values["rewards"][:1]
    config = told(values, "{prompt}{better}")
    assert shown_of(config, group, ["?"], room=3) == ["?b", None, "?b", "?b"]
    assert shown_of(config, group, ["?"], room=2) == [None] * 4


def test_the_errors_of_tools_are_shown_below_each_other_and_what_reset_adds_after_them(values: dict[str, Any]) -> None:
    def talked(*answers: str) -> Sample:
        messages = [
            {"role": "assistant", "content": "Error: mine"},
            *({"role": "tool", "content": it} for it in answers),
        ]
        return sampled(0, "", 0.0, 0.0, said=Said(opening="Go.", messages=messages))

    seen: list[Shown] = []
    values["environment"] = {"tools": ["tests.grpo_core.environments.playing:add"]}
    config = told(values, "{prompt} {error}")
    view = Privileged(config, lambda shown: seen.extend(shown) or [[1] for _ in shown], 10)
    samples = [talked("Error: a", "4", "Error: b"), talked("4"), talked(), talked("Error: c")]
    assert privileged.shown_prompts(view, samples, [{"prompt": TALK}]) == [[1], None, None, [1]]
    assert [(prompt[-1]["content"], opening) for prompt, _, opening in seen] == [
        ("And 2+2? Error: a\nError: b", "Go."),
        ("And 2+2? Error: c", "Go."),
    ]


def test_the_last_message_of_the_user_is_replaced_and_a_missing_value_shows_nothing() -> None:
    tool = [*TALK, {"role": "tool", "content": "4", "name": None}]
    row = {"prompt": tool, "answer": 4.0, "steps": ["add", "say"], "none": None, "blank": " "}
    shown = shown_prompt("{steps} {answer}: {prompt} {{x}}", row, {})
    assert shown[3:] == [{"role": "user", "content": "add\nsay 4: And 2+2? {x}"}, {"role": "tool", "content": "4"}]
    for template in ("{prompt}{none}", "{prompt}{blank}", "{prompt}{absent}"):
        assert shown_prompt(template, row, {}) is None
    assert shown_prompt("{prompt}{answer}", {**row, "prompt": TALK[:1]}, {}) is None


OTHERS: list[dict[str, Any]] = [
    {},
    {"model": "m", "template": "{prompt}!"},
    {"url": "http://a:1", "template": "{prompt}!"},
]


@pytest.mark.parametrize(
    ("keys", "sentence"),
    [
        ({"template": "{answer}"}, "leaves that out; put {prompt} where it belongs"),
        ({"template": " {prompt}\n"}, "shows the prompt alone; add what the teacher should know"),
        ({"template": "{prompt} {}"}, "a place is a plain name in braces, as in 'Question: {question}'; write {{"),
        (
            {"template": "{prompt} in {"},
            "Single '{' encountered in format string; write {{ or }} for a brace of your own",
        ),
        ({"template": "{prompt}{answer}", "revision": "main"}, "revision='main' is of a model; set model"),
        ({"model": "self", "template": "{prompt}!"}, "the policy teaches itself where template is set; remove model"),
        *(({**it, "update_rate": 0.1}, "update_rate=0.1 averages a policy that teaches itself: set") for it in OTHERS),
        ({"template": "{prompt}{error}"}, "{error} is what tools answer when they fail, and there are none"),
    ],
)
def test_a_template_that_cannot_teach_is_refused(values: dict[str, Any], keys: dict[str, Any], sentence: str) -> None:
    with pytest.raises(ConfigError, match=re.escape(sentence)):
        parse_config({**values, "teacher": keys})


def test_a_template_does_not_go_with_what_leaves_it_nothing_to_show(values: dict[str, Any]) -> None:
    def with_rollout(**keys: Any) -> dict[str, Any]:
        return {**values, "rollout": {**values["rollout"], **keys}}

    with pytest.raises(ConfigError, match=r"teacher\.template='\{prompt\}!'.*the teacher teaches there; remove one"):
        told(with_rollout(dynamic_sample=True), "{prompt}!")
    with pytest.raises(ConfigError, match="another completion of the same group, and there is none"):
        told(with_rollout(num_generations=1), "{prompt}{better}")
    tools = {"environment": {"tools": ["tests.grpo_core.environments.playing:add"]}}
    with pytest.raises(ConfigError, match="a recording does not keep the prompts of conversations as messages"):
        told({**with_rollout(engine="recorded", recording="run"), **tools}, "{prompt}{answer}")
    alone = {"rewards": [{**values["rewards"][0], "weight": 0.0}]}
    with pytest.raises(ConfigError, match="no reward with a weight: every group would be replaced"):
        told({**with_rollout(dynamic_sample=True), **alone}, "{prompt}{better}")
    unpaid = {**with_rollout(num_generations=1), **alone}
    assert make_plan(plan_inputs(told(unpaid, "{prompt}{answer}"), 24)).num_generations == 1


def test_columns_are_needed_of_training_prompts_alone_and_missing_values_are_named(tmp_path: Path) -> None:
    def data(**hints: list[str | None]) -> None:
        for name, first in (("train", 10), ("eval", 20)):
            prompts = [f"{n}+1=" for n in range(first, first + 3)]
            columns = {"prompt": prompts, "answer": [str(n + 1) for n in range(first, first + 3)]}
            pl.DataFrame(columns | ({"hint": hints[name]} if name in hints else {})).write_parquet(
                tmp_path / f"{name}.parquet"
            )

    model = make_model(tmp_path / "model")  # a token per character, 64 positions
    config = told(config_values(model, tmp_path), "{prompt}{hint}={better}")
    data(eval=["1", "2", "3"])
    assert "train has no column 'hint', which teacher.template reads" in screen(config).shape[0]
    data(train=["1", None, "3"])
    screened = screen(config)
    (finding,) = screened.report["findings"]
    assert (finding["check"], finding["column"], finding["rows"]) == ("missing_value", "hint", 1)
    assert screened.findings["row"].to_list() == [1]
    data(train=["1", "22", "333"])
    screened = screen(config)
    assert not screened.refused and screened.report["columns"]["hint"] == ["teacher.template"]
    # 5 of "12+1=", 3 of "333", "=", and the 6 that another completion may have.
    assert screened.report["longest_shown"] == 5 + 3 + 1 + 6
    for length, fits in ((27, True), (28, False)):  # 9 and twice this, in 64
        long = told(config_values(model, tmp_path, max_completion_length=length), "{prompt}{hint}={better}")
        if fits:
            assert screen(long).report["longest_shown"] == 9 + length
        else:
            with pytest.raises(
                ModelError, match=r"may have 37 tokens, 1 · 28 of them for \{better\} and \{error\}, and"
            ):
                screen(long)


def test_a_run_is_known_by_its_template_and_so_are_its_validated_prompts(
    values: dict[str, Any], tmp_path: Path
) -> None:
    for name in ("train", "eval"):
        (tmp_path / f"{name}.parquet").write_bytes(b"")
    values["data"] = {name: str(tmp_path / f"{name}.parquet") for name in ("train", "eval")}
    first = lineage_keys(told(values, "{prompt}{answer}"))
    assert lineage_keys(told(values, "{prompt}{answer}")) == first
    for config in (told(values, "{prompt} {answer}"), parse_config(values)):
        found = lineage_keys(config)
        assert {name for name in first if found[name] != first[name]} >= {"validate", "plan", "train", "evaluate"}
    for keys in ({"weight": 0.5}, {"update_rate": 0.5}):
        other = lineage_keys(told(values, "{prompt}{answer}", **keys))
        assert other["validate"] == first["validate"] and other["train"] != first["train"]


def test_the_forecast_counts_a_pass_of_the_policy_over_what_it_is_shown_and_no_other_weights() -> None:
    values = config_values(Path("model"), Path("data"), mixed_precision="bf16", engine="transformers", max_steps=10)
    alone, config, policy = parse_config(values), told(values, "{prompt}{answer}"), qwen("1.5B")
    lengths = [PromptLengths(140, 220, "given", shown) for shown in (0, 220, 4_000_000)]
    plan, hours = plan_of(config), []
    for keys, each in ((alone, lengths[0]), (config, lengths[1]), (config, lengths[2])):
        hours.append(wall_time(keys, plan, each, PACE, policy, None)["parts_hours"]["updates"])
    extra = [hour - hours[0] for hour in hours[1:]]
    completions = plan.num_generations * PACE.completion_tokens  # of a group, behind one prompt
    layers, head = policy.parameters - policy.outside, policy.vocabulary * policy.hidden
    products = [layers * (140 + more + completions) + head * completions for more in (0, 4_000_000 - 220)]
    assert extra[1] / extra[0] == pytest.approx(products[1] / products[0])
    small, same, large = (
        peak_memory(planned(keys, "1.5B", each, named_gpu("H200")))["parts_gib"]
        for keys, each in ((alone, lengths[0]), (config, lengths[1]), (config, lengths[2]))
    )
    assert small == same and large["teacher"] == 0 < large["teacher_pass"]


@pytest.mark.parametrize(
    ("keys", "held", "lent"),
    [
        ({}, 4, 2),  # in a pass, the policy's bfloat16 copy waits
        ({"sharding": "full", "num_processes": 8}, 4 / 8, 4 / 8),  # of the weights that are gathered
        ({"use_peft": True, "lora_r": 8}, 4, 2),
    ],
    ids=["whole", "shares", "adapter"],
)
def test_the_forecast_counts_an_average_and_the_policys_own_weights_in_its_pass(
    keys: dict[str, Any], held: float, lent: float
) -> None:
    """Bytes per trained parameter, of 1.54 billion or of an adapter's 9 million."""
    values = config_values(Path("model"), Path("data"), mixed_precision="bf16", engine="transformers", **keys)
    lengths = PromptLengths(140, 220, "given", 4_000_000)  # so that the pass is the worst moment
    configs = [told(values, "{prompt}{answer}"), told(values, "{prompt}{answer}", update_rate=0.1)]
    runs = [planned(config, "1.5B", lengths, named_gpu("H200")) for config in configs]
    without, found = (peak_memory(run)["parts_gib"] for run in runs)
    trained = adapter_parameters(runs[0].shape, configs[0]) if "use_peft" in keys else runs[0].shape.parameters
    assert (without["teacher"], found["teacher"] * GIB) == (0, pytest.approx(held * trained))
    assert (found["teacher_pass"] - without["teacher_pass"]) * GIB == pytest.approx(lent * trained)


def test_an_average_that_a_gpu_cannot_hold_is_refused() -> None:
    """1.5B: 5.8 GiB, and 25.9 with weights, moments and the copy in bfloat16."""
    values = config_values(Path("model"), Path("data"), mixed_precision="bf16", engine="transformers")
    run = planned(told(values, "{prompt}!", update_rate=0.05), "1.5B", PromptLengths(1, 1, "given"), Gpu("GPU", 24.0))
    with pytest.raises(ConfigError, match=r"update_rate = 0\.05: the average's weights are 5\.8 GiB per GPU, 25\."):
        check_teacher_memory(run)
    check_teacher_memory(replace(run, gpu=Gpu("GPU", 28.0)))


@pytest.mark.slow
def test_the_gap_is_teacher_kl_with_the_other_sign_and_absent_where_nothing_is_shown(
    values: dict[str, Any], tmp_path: Path
) -> None:
    """That it is the mean over the taught tokens, the plain trainings of test_plain.py hold."""
    values["teacher"] = {"template": "{better}+{prompt}"}
    run = trained_run(tmp_path / "run", values)
    shares = []
    for index, step in enumerate(metrics_of(run)):
        file = run / "training" / "completions" / f"rollout-{index:06d}.parquet"
        rows = pl.read_parquet(file).to_dicts()
        shown = shown_prompts(run, parse_config(values), rows)
        assert step["teacher_shown"] == pytest.approx(sum(map(bool, shown)) / len(rows))
        assert ("teacher_kl" in step) == any(shown)
        assert step.get("privileged_gap", 0.0) == pytest.approx(-step.get("teacher_kl", 0.0))
        shares.append(step["teacher_shown"])
    assert 0 < max(shares) < 1
