"""Promotions and rollbacks killed at any write, and two at the same time, on a real MLflow database."""

from __future__ import annotations

import json
import multiprocessing
from itertools import count, pairwise
from multiprocessing.synchronize import Barrier
from typing import Any

import pytest
from mlflow import MlflowClient
from mlflow.entities.model_registry import ModelVersion
from mlflow.store.model_registry.dbmodels.models import SqlRegisteredModelTag

from tasks.registry import champion as module
from tasks.registry import judging
from tasks.registry.champion import PromotionError, is_decided, promote, rollback
from tasks.tracking.runs import connect
from tests.evaluations import register_version
from tests.tasks.registry.champions import champion_of, history_of, make_champions, samples_of, tags_of

pytestmark = pytest.mark.usefixtures("mlflow")


@pytest.fixture(autouse=True)
def _read_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each version's evaluation is read from MLflow once: half the time of these tests, and they are about writes."""
    recorded, known = judging.read_recorded, {}

    def read_once(client: MlflowClient, version: ModelVersion) -> Any:
        place = version.name, version.version
        if place not in known:
            known[place] = recorded(client, version)
        return known[place]

    for reader in (judging, module):
        monkeypatch.setattr(reader, "read_recorded", read_once)


class _Killed(BaseException):
    pass


class _Dying:
    """A client whose process is killed before its write number `writes`, counted from 0."""

    def __init__(self, client: MlflowClient, writes: int):
        self.client, self.left = client, writes

    def __getattr__(self, name: str) -> Any:
        if name.startswith(("set_", "delete_")):
            if self.left == 0:
                raise _Killed
            self.left -= 1
        return getattr(self.client, name)


def _is_killed(action: Any, model: str, writes: int) -> bool:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(module, "connect", lambda: _Dying(connect(), writes))
        try:
            action(model)
        except _Killed:
            return True
    return False


@pytest.mark.slow
def test_a_promotion_and_a_rollback_that_are_killed_at_any_write_are_finished_by_the_next_one(model: str) -> None:
    make_champions(model, 2)
    expected = {key: value for key, value in tags_of(model, "2").items() if key != "at"}
    rollback(model)
    for writes in count():
        before = history_of(model)
        is_promotion_killed = _is_killed(promote, model, writes)
        # Until it is done, the pipeline's retry tries again. Before the first write to the version, which follows the
        # one that counts the attempt, the decision is the one before.
        assert is_decided(model, "2") == (writes < 2 or not is_promotion_killed)
        if is_promotion_killed:
            assert promote(model).decision == "promoted"
        assert promote(model).decision == "unchanged"
        tags = tags_of(model, "2")
        assert tags.pop("at")
        assert tags == expected
        assert (champion_of(model), history_of(model)) == ("2", [*before, ("2", "promoted")])

        is_rollback_killed = _is_killed(rollback, model, writes)
        if is_rollback_killed:
            assert rollback(model) == ("2", "1")
        tags = tags_of(model, "2")
        assert tags.pop("at") and tags.pop("rolled_back_at")
        assert tags == {**expected, "rolled_back_to": "1"}
        assert (champion_of(model), history_of(model)) == ("1", [*before, ("2", "promoted"), ("1", "rolled back")])
        if not is_promotion_killed and not is_rollback_killed:
            break
    assert writes > 10


@pytest.mark.slow
def test_a_rollback_of_a_promotion_that_was_killed_is_not_undone_by_the_pipeline(model: str) -> None:
    make_champions(model, 2)
    rollback(model)
    killed = next(writes for writes in count() if _is_killed(promote, model, writes) and champion_of(model) == "2")
    assert killed > 0 and not is_decided(model, "2")
    assert rollback(model) == ("2", "1")
    assert is_decided(model, "2"), "a pipeline tries only what is not decided"


@pytest.mark.slow
@pytest.mark.parametrize("writes", [*(pytest.param(it, marks=pytest.mark.e2e) for it in (1, 3)), 2])
def test_a_promotion_that_follows_a_killed_rollback_knows_it_as_one(model: str, writes: int) -> None:
    make_champions(model, 2)
    assert _is_killed(rollback, model, writes)
    present = champion_of(model)
    register_version(model, samples_of(base=0, trained=30))
    assert promote(model).against == present
    rolled_back = [] if present == "2" else [("1", "rolled back")]
    assert history_of(model) == [("1", "promoted"), ("2", "promoted"), *rolled_back, ("3", "promoted")]


@pytest.mark.slow
def test_a_champion_that_another_machine_sets_meanwhile_is_left_alone(
    model: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    make_champions(model, 2)
    judge = module.judge

    def other_machine(*arguments: Any) -> Any:
        verdict = judge(*arguments)
        connect().set_registered_model_alias(model, "champion", "1")
        return verdict

    register_version(model, samples_of(base=0, trained=40))
    monkeypatch.setattr(module, "judge", other_machine)
    with pytest.raises(PromotionError, match=r"was version 2 at the start and is version 1 now.*start again"):
        promote(model)
    assert (champion_of(model), "decision" in tags_of(model, "3"), is_decided(model, "3")) == ("1", False, False)
    monkeypatch.setattr(module, "judge", judge)
    assert promote(model).against == "1"


@pytest.mark.slow
def test_a_history_that_is_too_long_for_its_column_is_cut_by_the_next_promotion(model: str) -> None:
    """SQLite takes any length, PostgreSQL none above the column's; a database may be moved from one to the other."""
    make_champions(model, 2)
    entry = {"how": "promoted", "at": "2026-01-01T00:00:00+00:00"}
    history = [{"version": version, **entry} for version in (*["1", "2"] * 200, "1", "2")]
    connect().set_registered_model_tag(model, "champion.history", json.dumps(history))
    register_version(model, samples_of(base=0, trained=30))
    assert promote(model).decision == "promoted"
    tag = connect().get_registered_model(model).tags["champion.history"]
    assert len(tag) <= SqlRegisteredModelTag.__table__.c.value.type.length
    assert rollback(model) == ("3", "2")


def _promote_at_once(barrier: Barrier, versions: list[tuple[str, str]]) -> None:
    connect().search_registered_models()  # everything is imported and connected
    for model, version in versions:
        barrier.wait(timeout=300)
        promote(model, version)


@pytest.mark.slow
@pytest.mark.e2e
def test_of_two_at_once_the_second_meets_the_first_as_champion() -> None:
    races = {f"race-{right[0]}-{right[1]}": right for right in [(16, 16), (16, 30)]}
    candidates: dict[str, list[str]] = {}
    for model, right in races.items():
        make_champions(model, 1)
        candidates[model] = [register_version(model, samples_of(base=0, trained=count)) for count in right]
    context: Any = multiprocessing.get_context("spawn")
    barrier = context.Barrier(2)
    racers = [
        context.Process(target=_promote_at_once, args=(barrier, [(model, candidates[model][place]) for model in races]))
        for place in range(2)
    ]
    for racer in racers:
        racer.start()
    for racer in racers:
        racer.join(timeout=300)
    assert [racer.exitcode for racer in racers] == [0, 0]
    for model, right in races.items():
        history = [version for version, _ in history_of(model)]
        assert history[-1] == champion_of(model)
        for before, champion in pairwise(history):
            tags = tags_of(model, champion)
            assert (tags["decision"], tags["against"]) == ("promoted", before)
        for version in set(candidates[model]) - set(history):
            tags = tags_of(model, version)
            assert (tags["decision"], tags["against"]) == ("refused", history[-1])
        assert right[candidates[model].index(history[-1])] == max(right)
