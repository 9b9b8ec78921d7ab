"""`grpo sweep --optuna`: ranges are refused before the first arm starts, and a search that was ended goes on with the
same trials."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from flows import sweep as flow
from flows.parameters.search import make_search, read_range, read_ranges
from grpo_core.config.files import parse_config, read_values, with_keys
from grpo_core.errors import GrpoError
from tasks.stages.errors import Interrupted, StageError
from tasks.stages.trials import TRIALS, Range, add_trial, read_trials
from tests.command_line import run_here

RATE = "train.learning_rate=1e-3:1e-1:log"


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("1e-6:1e-4:log", Range(1e-6, 1e-4, log=True)),
        ("0:20", Range(0, 20, whole=True)),
        ("0:1.5", Range(0, 1.5)),
        ("1:8:log", Range(1, 8, log=True, whole=True)),
    ],
)
def test_a_range_is_of_integers_if_both_ends_are(text: str, expected: Range) -> None:
    assert read_range("some.key", text) == expected


@pytest.mark.slow
@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        (["--range", RATE], "--range train.learning_rate: only with --optuna N"),
        (["--optuna", "3", "--grid", "algorithm.beta=0.0,0.1"], "--optuna needs a range to search"),
        (["--optuna", "1", "--range", RATE], "--optuna 1: a sweep has from 2 to 256 arms"),
        (["--optuna", "3", "--range", "train.learning_rate=2:1"], "is not of the form LOW:HIGH"),
        (["--optuna", "3", "--range", "train.learning_rate=1e-3:nan"], "is not of the form LOW:HIGH"),
        (["--optuna", "3", "--range", "train.learning_rate=1e-3:1e-1:lin"], "is not of the form LOW:HIGH"),
        (["--optuna", "3", "--range", "train.learning_rate=true:false"], "is not of the form LOW:HIGH"),
        (["--optuna", "3", "--range", "train.learning_rate"], "is not of the form section.key=LOW:HIGH"),
        (["--optuna", "3", "--range", "algorithm.beta=0.0:0.1:log"], "0 is not on a logarithmic scale"),
        (["--optuna", "3", "--range", RATE, "--range", RATE], "--range train.learning_rate: given twice"),
        (["--optuna", "3", "--range", RATE, "--grid", "train.learning_rate=1e-3,1e-2"], "it is in --grid too"),
        (["--optuna", "3", "--range", RATE, "--seeds", "2"], "--optuna with several seeds: each proposal"),
        (["--optuna", "3", "--range", "seed=0:9"], "--optuna with several seeds: each proposal"),
        (["--optuna", "3", "--range", RATE, "--stop-early"], "--optuna with --stop-early: a stopped"),
        (["--optuna", "3", "--range", "algorithm.beta=0:1"], "the ranges hold only 2 combinations; try them"),
        (["--optuna", "3", "--range", "evaluation.temperature=0.0:1.0"], "--range evaluation.temperature: the arms"),
        (["--optuna", "3", "--range", "train.learning_rate=-1.0:1.0"],
         "arm train.learning_rate=-1.0: train.learning_rate = -1.0: Input should be greater than 0"),
        (["--optuna", "3", "--range", "train.max_steps=2.5:9"], "arm train.max_steps=2.5: train.max_steps = 2.5: "),
        (["--optuna", "3", "--range", "rollout.num_generations=4:8"],
         "--range rollout.num_generations: 5 is refused; to try some of the values only: --grid rollout.num_gen"),
        (["--optuna", "3", "--range", RATE, "--grid", f"train.save_steps={','.join(map(str, range(1, 200)))}"],
         "the ends of the ranges with all choices are 398 combinations"),
        (["--optuna", "3", "--range", "train.learing_rate=1e-3:1e-1"], "unknown key; did you mean 'learning_rate'?"),
    ],
    ids=lambda value: "",
)  # fmt: skip
def test_what_cannot_be_searched_is_refused_before_anything_starts(
    config: Path, options: list[str], sentence: str
) -> None:
    done = run_here("sweep", str(config), *options)
    assert (done.returncode, done.stdout) == (2, "")
    assert sentence in done.stderr
    assert not (config.parent / "storage").exists()


def search(config: Path, *ranges: str, trials: int = 4, **grid: list[Any]) -> flow.Sweep:
    def load(keys: Any) -> Any:
        return parse_config(with_keys(read_values(config), keys))

    named = {key.replace("__", "."): values for key, values in grid.items()}
    return make_search(load, read_ranges(ranges), named, trials, "search")


@pytest.fixture
def ran(monkeypatch: pytest.MonkeyPatch, without_prefect: None) -> list[dict[str, Any]]:
    """The keys of the arms that a search runs without Prefect, in their order; `fate` says how each ends."""
    done: list[dict[str, Any]] = []
    fate[0] = lambda number: None

    def make_pipeline(config: Any) -> Callable[..., None]:
        def run(preset: str, changes: dict[str, Any]) -> None:
            done.append({"name": config.name, **changes["train"], "beta": config.algorithm.beta})
            if error := fate[0](len(done)):
                raise error

        return run

    def propose(sweep: str, space: Any, seed: int, arms: list[str]) -> Any:
        outcomes = [-abs(values["train.learning_rate"] - 0.02) for values in read_trials(sweep)]
        values = add_trial(sweep, space, seed, outcomes)
        return SimpleNamespace(result=lambda: values)

    nothing = SimpleNamespace(result=lambda: None, message="")
    replaced = {
        "make_pipeline": make_pipeline,
        "propose": propose,
        "begin": lambda *_: nothing,
        "choose": lambda *_: nothing,
        "announce_sweep": lambda *_: None,
    }
    for name, replacement in replaced.items():
        monkeypatch.setattr(flow, name, replacement)
    return done


fate: list[Callable[[int], GrpoError | None]] = [lambda number: None]


@pytest.mark.slow  # imports optuna
def test_a_search_that_was_ended_goes_on_with_the_same_trials(config: Path, ran: list[dict[str, Any]]) -> None:
    def run(trials: int) -> None:
        asked = search(config, RATE, "train.save_steps=1:4", trials=trials, algorithm__beta=[0.0, 0.1])
        flow._run_arms(asked, str(config), {})

    run(8)
    whole = [*ran]
    assert len({arm["name"] for arm in whole}) == 8
    assert all(1e-3 <= arm["learning_rate"] <= 1e-1 for arm in whole)
    assert {type(arm["save_steps"]) for arm in whole} == {int} and {arm["beta"] for arm in whole} == {0.0, 0.1}
    (config.parent / "storage" / "sweeps" / "test.search" / TRIALS).unlink()
    ran.clear()
    fate[0] = lambda number: Interrupted("train was interrupted", KeyboardInterrupt()) if number == 7 else None
    with pytest.raises(Interrupted):
        run(8)
    assert ran == whole[:7]
    ran.clear()
    fate[0] = lambda number: StageError("it diverged") if number == 3 else None
    with pytest.raises(StageError, match="1 of 9 arms failed"):
        run(9)
    assert ran[:8] == whole, "the trials that were proposed, then those that would have been"
    with pytest.raises(GrpoError, match="searches other ranges"):
        search(config, "train.learning_rate=1e-3:1e-2:log", trials=9)


@pytest.mark.slow
def test_a_search_learns_from_outcomes_and_from_them_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Ten trials at x, of which those near 0.2 come out best: after them, half of the proposals are nearer than chance
    would have four in twenty."""
    monkeypatch.setenv("GRPO_STORAGE", str(tmp_path))
    folder = tmp_path / "sweeps" / "sums.search"
    folder.mkdir(parents=True)
    space = {"x": Range(0.0, 1.0)}
    tried = [{"x": place / 10} for place in range(10)]
    near = {}
    for known in (True, False):
        outcomes = [-abs(values["x"] - 0.2) if known else None for values in tried]
        proposed = []
        for seed in range(20):
            (folder / TRIALS).write_text(json.dumps({"space": {}, "trials": tried}))
            proposed.append(add_trial("sums.search", space, seed, outcomes)["x"])
        near[known] = sum(abs(x - 0.2) <= 0.1 for x in proposed)
    assert near[True] >= 10 > near[False]


@pytest.mark.slow
def test_no_values_are_proposed_twice(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GRPO_STORAGE", str(tmp_path))
    (tmp_path / "sweeps" / "sums.search").mkdir(parents=True)
    space = {"n": Range(1, 3, whole=True), "beta": [0.0, 0.1]}
    proposed = [
        add_trial("sums.search", space, 0, [values["n"] for values in read_trials("sums.search")]) for _ in "123456"
    ]
    assert len({(values["n"], values["beta"]) for values in proposed}) == 6
