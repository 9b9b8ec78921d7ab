"""The arms of `grpo sweep`: every combination once, each a run by a name of its own; what is wrong with any of them is
refused before anything is begun, and says which."""

from __future__ import annotations

import itertools
import json
import re
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import polars as pl
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from prefect.states import Cancelled, Completed, Failed

from flows import sweep as flow
from flows.cli import sweep as command
from flows.parameters.arms import Load, Sweep, make_sweep, read_grid
from flows.parameters.form import add_changes, resolve
from flows.parameters.search import make_requested_sweep
from grpo_core.config.files import load_config, parse_config, read_values, with_keys
from grpo_core.errors import GrpoError
from tasks.stages.arms import sweep_folder
from tasks.stages.errors import ArmStopped, Interrupted, StageError
from tasks.stages.locks import RunInUseError, locked
from tasks.tracking.early_stop import shared_level, trainings_of, write_rule
from tests.command_line import run_here
from tests.conftest import write_sums


def loader(config: Path, *overrides: str) -> Load:
    return lambda keys: parse_config(with_keys(read_values(config, [*overrides]), keys))


def make(config: Path, *grid: str, seeds: int = 1, overrides: tuple[str, ...] = (), stop_early: bool = False) -> Sweep:
    return make_requested_sweep(loader(config, *overrides), read_grid(grid), seeds, "sweep", stop_early, 0, {})


@pytest.mark.parametrize("name", ["", ".", "a/b", "../x", "a b"])
def test_a_name_that_cannot_begin_the_names_of_runs_is_refused(config: Path, name: str) -> None:
    with pytest.raises(GrpoError, match=re.escape(f"--name {name!r}: the arms' names begin with it")):
        make_sweep(loader(config), {"seed": [1, 2]}, 1, name)


def test_further_seeds_go_on_from_the_arms_that_were_run_without(config: Path) -> None:
    grid = ("train.learning_rate=1e-2,3e-3",)
    one, several = make(config, *grid), make(config, *grid, seeds=3)
    configs = [arm.config for arm in several.arms]
    assert len(configs) == 6 and [config for config in configs if config.seed == 0] == [it.config for it in one.arms]


@pytest.mark.parametrize("values", [1e-4, "12", None, {}, []])
def test_a_grid_without_a_list_is_refused(config: Path, values: Any) -> None:
    with pytest.raises(GrpoError, match=re.escape(f"--grid train.learning_rate={values!r}: give a list of values")):
        make_sweep(loader(config), {"train.learning_rate": values}, 1, "sweep")


def test_every_combination_is_a_run_that_differs_in_these_keys_alone(config: Path) -> None:
    grid = ("train.learning_rate=1e-2,3e-3", "algorithm.beta=0.0,0.04")
    sweep = make(config, *grid, seeds=2, overrides=("seed=5", "registry.alias=mine", "promotion.automatic=true"))
    found = {arm.config.name: arm for arm in sweep.arms}
    combinations = itertools.product((1e-2, 3e-3), (0.0, 0.04), (5, 6))
    names = [f"test.sweep.learning_rate-{r}_beta-{b}" + f"_seed-{s}" * (s != 5) for r, b, s in combinations]
    assert [*found] == names
    plain = load_config(config)
    for arm, (rate, beta, seed) in zip(sweep.arms, itertools.product((1e-2, 3e-3), (0.0, 0.04), (5, 6)), strict=True):
        expected = parse_config(
            {
                **plain.model_dump(exclude_none=True),
                "name": arm.config.name,
                "seed": seed,
                "train": {**plain.train.model_dump(exclude_none=True), "learning_rate": rate},
                "algorithm": {**plain.algorithm.model_dump(exclude_none=True), "beta": beta},
                "registry": {"sweep": "test.sweep", "model_name": "test", "alias": "arm"},
            }
        )
        assert arm.config == expected, "no arm promotes itself"
    assert sweep.base.registry.alias == "mine"


@settings(max_examples=30)
@given(
    values=st.lists(
        st.text(st.characters(codec="utf-8", exclude_characters="\x7f")), min_size=2, max_size=9, unique=True
    )
)
def test_arms_have_names_of_their_own_whatever_their_values(values: list[str]) -> None:
    from flows.parameters.arms import _slug

    names = [_slug({"data.train": value}) for value in values]
    assert len({*names}) == len(values)
    assert all(re.fullmatch(r"[A-Za-z0-9._-]{,180}", name) for name in names)


@pytest.mark.parametrize(
    ("text", "values"),
    [
        ("train.max_steps=1,2", [1, 2]),
        ("algorithm.beta=0, 1e-3", [0, 1e-3]),
        ("algorithm.loss_type=grpo,dr_grpo", ["grpo", "dr_grpo"]),
        ("model.use_peft=true,false", [True, False]),
        ('rollout.x="a,b",["c"]', ["a,b", ["c"]]),
        ("train.sharding=none,3", ["none", 3]),
    ],
)
def test_values_are_toml_or_plain_words(text: str, values: list[Any]) -> None:
    assert read_grid([text]) == {text.partition("=")[0]: values}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("grid", "seeds", "overrides", "sentences"),
    [
        ((), 1, (), ["the arms of a sweep have to differ"]),
        (("train.beta",), 1, (), ["is not of the form section.key=value,value"]),
        (("seed=1,2", "seed=3,4"), 1, (), ["--grid seed: given twice"]),
        (("seed=1,2",), 2, (), ["--grid seed and --seeds: both set the seeds"]),
        (("train.learning_rate=1e-3",), 1, (), ["1 arm: a sweep has from 2 to 256"]),
        (("train.max_steps=3,3",), 1, (), ["arms train.max_steps=3 and train.max_steps=3 are the same"]),
        (("train.learing_rate=1,2",), 1, (), ["train.learing_rate: unknown key; did you mean 'learning_rate'?"]),
        (("train.learning_rate=1e-3,fast",), 1, (), ["arm train.learning_rate=fast: train.learning_rate = 'fast': "]),
        (("rollout.num_generations=4,5", "algorithm.beta=0.0,0.1"), 1, (),
         ["arm rollout.num_generations=5, algorithm.beta=0.0; rollout.num_generations=5, algorithm.beta=0.1: ",
          "is not divisible by num_generations=5"]),
        (("rewards.0.weight=1,2",), 1, (), ["--grid rewards.0.weight: the arms would be evaluated differently"]),
        (("rollout.max_completion_length=4,6",), 1, (), ["set evaluation.max_completion_length for all arms"]),
        (("promotion.confidence=0.9,0.95",), 1, (), ["the same for all arms of a sweep"]),
        (("name=a,b",), 1, (), ["the same for all arms of a sweep"]),
        (('data={train="a", eval="b"},1',), 1, (), ["--grid data: the arms would be evaluated differently"]),
        (("seed=0,1",), 1, ("data.eval=gone.csv",), ["data.eval = 'gone.csv'"]),
        (("train.save_steps=" + ",".join(map(str, range(1, 300))),), 1, (), ["299 arms: a sweep has from 2 to 256"]),
    ],
    ids=lambda value: "",
)  # fmt: skip
def test_what_is_wrong_is_refused_and_names_the_arm(
    config: Path, grid: tuple[str, ...], seeds: int, overrides: tuple[str, ...], sentences: list[str]
) -> None:
    given = [word for key in grid for word in ("--grid", key)] + [w for key in overrides for w in ("--set", key)]
    done = run_here("sweep", str(config), "--seeds", str(seeds), *given)
    assert (done.returncode, done.stdout) == (2, ""), done.stdout
    for sentence in sentences:
        assert done.stderr.count(sentence) == 1, done.stderr
    assert not (config.parent / "storage").exists()


def test_the_length_of_completions_can_differ_where_that_of_evaluations_does_not(config: Path) -> None:
    sweep = make(config, "rollout.max_completion_length=4,6", overrides=("evaluation.max_completion_length=6",))
    assert [arm.config.evaluation_length for arm in sweep.arms] == [6, 6]


@pytest.fixture
def ran(monkeypatch: pytest.MonkeyPatch, without_prefect: None) -> list[str]:
    """What a sweep does without Prefect, in its order; pipelines do nothing but fail as `fates` says."""
    done: list[str] = []

    def make_pipeline(config: Any) -> Any:
        def run(preset: str, changes: dict[str, Any]) -> None:
            done.append(f"{config.name} {json.dumps(changes['train'])}")
            if error := fates.get(config.train.learning_rate):
                raise error

        return run

    def task(name: str) -> Any:
        def run(sweep: str, argument: str, *_: Any) -> Any:
            done.append(f"{name} {sweep} {argument}")
            return SimpleNamespace(result=lambda: None, message=f"{name} has ended")

        return run

    monkeypatch.setattr(flow, "make_pipeline", make_pipeline)
    monkeypatch.setattr(flow, "announce_sweep", lambda sweep, _: done.append(f"announced {sweep}"))
    for name in ("begin", "choose"):
        monkeypatch.setattr(flow, name, task(name))
    return done


fates: dict[float, GrpoError] = {}


def test_an_arm_that_fails_keeps_none_of_the_others_from_running(config: Path, ran: list[str]) -> None:
    sweep = make(config, "train.learning_rate=0.1,0.2,0.3")
    arms = [f'test.sweep.learning_rate-{rate} {{"learning_rate": {rate}}}' for rate in (0.1, 0.2, 0.3)]
    fates.clear()
    state = flow._run_arms(sweep, str(config), {})
    assert state.data == config.parent / "storage" / "sweeps" / "test.sweep"
    assert state.message == "choose has ended"
    assert ran == ["begin test.sweep grpo", *arms, "choose test.sweep candidate", "announced test.sweep"]
    ran.clear()
    fates[0.2] = StageError("it diverged")
    with pytest.raises(StageError, match=r"1 of 3 arms failed.*\ntest.sweep.learning_rate-0.2: it diverged"):
        flow._run_arms(sweep, str(config), {})
    assert ran == ["begin test.sweep grpo", *arms, "choose test.sweep candidate"]


def test_an_arm_that_was_stopped_for_being_behind_is_no_failure_and_is_not_run_again(
    config: Path, ran: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    evaluated = ("train.eval_steps=2", *RANGES)
    sweep = make(config, "train.learning_rate=0.1,0.2", overrides=evaluated, stop_early=True)
    fates.clear()
    fates[0.2] = ArmStopped("behind")
    monkeypatch.setattr(flow, "why_stopped", lambda run, config: "behind" if "0.2" in run.name and len(ran) > 2 else "")
    flow._run_arms(sweep, str(config), {})
    assert len(ran) == 5
    flow._run_arms(sweep, str(config), {})
    assert len(ran) == 5 + 4


RANGES = ("rewards.1.range=[0.0, 1.0]",)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("options", "overrides", "sentence"),
    [
        (("--seeds", "2"), ("train.eval_steps=2", *RANGES), "--stop-early with several seeds"),
        (("--grid", "seed=1,2"), ("train.eval_steps=2", *RANGES), "--stop-early with several seeds"),
        (("--grid", "train.max_steps=2,3"), ("model.gguf_file=m.gguf", *RANGES), "name that checkpoint, in bases/"),
        (("--grid", "train.max_steps=2,3"), RANGES, "arm train.max_steps=2 is not evaluated while it trains"),
        (("--grid", "train.max_steps=2,3"), ("train.eval_steps=2", "rewards.1.function=char_length"),
         "the range of the rewards"),
        (("--grid", "train.learning_rate=0.1,0.2"), ("train.eval_steps=4", *RANGES), "none could be stopped. Give all"),
        (("--grid", "train.eval_steps=2,3"), RANGES, "none could be stopped. Give all"),
        (("--grid", "train.learning_rate=0.1,0.2"), ("train.eval_steps=2", "data.eval=two.parquet", *RANGES),
         "with 2 held-out prompts and 2 arms, none could be stopped, even if its reward were the lowest on every "
         "prompt; hold out 9 prompts or more"),
        (("--grid", "train.learning_rate=0.1,0.2"),
         ("train.eval_steps=2", "evaluation.group_column=passage", "data.eval=passages.parquet", *RANGES),
         "with 2 held-out groups of prompts and 2 arms, none could be stopped, even if its reward were the lowest on "
         "every prompt; hold out 9 groups of prompts or more"),
    ],
    ids=["seeds", "seed", "gguf", "eval_steps", "range", "last update", "other updates", "few prompts", "few groups"],
)  # fmt: skip
def test_arms_that_could_not_be_stopped_honestly_are_refused(
    config: Path, options: tuple[str, ...], overrides: tuple[str, ...], sentence: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(config.parent)
    write_sums(config.parent / "two.parquet", 60, 62)
    if "model.gguf_file=m.gguf" in overrides:  # without config.json, it would be refused with the others
        (config.parent / "model" / "m.gguf").touch()
    sums = pl.read_parquet(write_sums(config.parent / "passages.parquet", 60, 76))
    sums.with_columns(passage=pl.int_range(16) % 2).write_parquet(config.parent / "passages.parquet")
    given = [word for key in overrides for word in ("--set", key)]
    done = run_here("sweep", str(config), "--stop-early", *options, *given)
    assert (done.returncode, done.stdout) == (2, "")
    assert sentence in done.stderr


@pytest.mark.slow
def test_the_level_of_stopping_is_spent_once_in_a_sweep(config: Path) -> None:
    def stopping(*grid: str, more: tuple[str, ...] = ()) -> Sweep:
        return make(config, *grid, overrides=("train.eval_steps=2", *RANGES, *more), stop_early=True)

    sweep = stopping("train.learning_rate=0.1,0.2")
    sweep_folder(sweep.name).mkdir(parents=True)
    write_rule(sweep.name, trainings_of([arm.config for arm in sweep.arms]), shared_level(0.95))
    stopping("train.learning_rate=0.1,0.2")  # goes on
    write_rule(sweep.name, {}, None)  # a command without --stop-early in between
    for grid, more in (("0.1,0.2,0.3", ()), ("0.2,0.1", ()), ("0.1,0.2", ("train.max_steps=8",))):
        with pytest.raises(GrpoError, match=r"has already stopped arms at level 0\.025"):
            stopping(f"train.learning_rate={grid}", more=more)


def test_a_table_of_keys_that_go_together_is_one_value_of_an_arm(config: Path) -> None:
    grid = 'data.curriculum={probe=4},{kind="band", band=[0.1, 0.9], probe=4}'
    sweep = make(config, grid, "train.learning_rate=0.1,0.2")
    kinds = [arm.config.data.curriculum.kind for arm in sweep.arms]
    assert kinds == ["none", "none", "band", "band"]
    changes = add_changes(str(config), {"seed": 7}, sweep.arms[2].keys)
    assert resolve(str(config), changes) == sweep.arms[2].config.model_copy(update={"seed": 7})


def test_a_key_that_all_arms_set_may_be_missing_without_them(config: Path) -> None:
    overrides = ("data.curriculum.kind=band", "data.curriculum.probe=4")
    sweep = make(config, "data.curriculum.band=[0.1, 0.9],[0.2, 0.8]", overrides=overrides)
    assert [arm.config.data.curriculum.band for arm in sweep.arms] == [(0.1, 0.9), (0.2, 0.8)]


def test_the_pace_is_measured_once_for_arms_of_one_shape(config: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    measured: list[float] = []

    def measure(config: Any, *_: Any) -> str:
        measured.append(config.rollout.num_generations)
        return "not known"

    monkeypatch.setattr(command, "measured_pace", measure)
    command._show_plan(make(config, "train.learning_rate=0.1,0.2", "rollout.num_generations=4,8"))
    assert measured == [4, 8]


def test_an_interruption_ends_the_sweep(config: Path, ran: list[str]) -> None:
    fates.clear()
    fates[0.1] = Interrupted("train was interrupted", KeyboardInterrupt())
    with pytest.raises(Interrupted):
        flow._run_arms(make(config, "train.learning_rate=0.1,0.2"), str(config), {})
    assert len(ran) == 2


def test_two_commands_do_not_work_on_one_sweep_at_a_time(config: Path, ran: list[str]) -> None:
    sweep = make(config, "train.learning_rate=0.1,0.2")
    folder = sweep_folder(sweep.name)
    folder.mkdir(parents=True)
    with locked(folder), pytest.raises(RunInUseError, match=r"'test\.sweep' is in use by process"):
        flow._run_arms(sweep, str(config), {})
    assert ran == []


def test_a_deployment_s_sweep_runs_its_arms_as_runs_of_the_pipeline_s_deployment(
    config: Path, ran: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    handed: list[tuple[str, str, dict[str, Any]]] = []
    states = {"test.sweep.learning_rate-0.2": Failed(), "test.sweep.learning_rate-0.3": Cancelled()}

    def run_elsewhere(of_deployment: str, parameters: dict[str, Any], name: str, interrupted: Any) -> Any:
        handed.append((of_deployment, parameters["preset"], parameters["changes"]))
        return SimpleNamespace(id="some", state=states.get(name, Completed()))

    monkeypatch.setattr(flow, "deployment", SimpleNamespace(id="some", name="local"))
    monkeypatch.setattr(flow, "run_elsewhere", run_elsewhere)
    monkeypatch.setattr(
        flow, "why_stopped", lambda run, config: "behind" if "0.3" in run.name and len(handed) > 2 else ""
    )
    evaluated = ("train.eval_steps=2", *RANGES)
    sweep = make(config, "train.learning_rate=0.1,0.2,0.3", overrides=evaluated, stop_early=True)
    with pytest.raises(StageError, match=r"1 of 3 arms failed.*\ntest.sweep.learning_rate-0.2: .* is Failed"):
        flow._run_arms(sweep, "quickstart", {"train": {"max_steps": 3}, "seed": 7})
    assert [(it, preset) for it, preset, _ in handed] == [("pipeline/local", "quickstart")] * 3
    assert handed[1][2] == {
        "name": "test.sweep.learning_rate-0.2",
        "seed": 7,
        "train": {"max_steps": 3, "learning_rate": 0.2},
        "registry": {"sweep": "test.sweep", "model_name": "test", "alias": "arm"},
        "promotion": {"automatic": False},
    }
