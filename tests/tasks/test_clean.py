"""`grpo clean`: what is old and not needed goes, everything else stays, whenever it is cut off."""

from __future__ import annotations

import itertools
import json
import os
import shutil
import socket
import sys
import tempfile
import time
import uuid
from collections.abc import Callable, Collection, Iterator
from multiprocessing.shared_memory import SharedMemory
from pathlib import Path
from typing import Any

import mlflow
import pytest
import tomli_w

from grpo_core.config.files import parse_config
from grpo_core.errors import GrpoError
from tasks import clean as cleaning
from tasks.clean import clean, leftovers
from tasks.registry.champion import PromotionError, promote, rollback
from tasks.stages import base_model
from tasks.stages.base_model import ORIGIN, with_checkpoint
from tasks.stages.locks import holding, lock, locked
from tasks.stages.run_directory import storage_root
from tasks.tracking.runs import connect
from tasks.tracking.traces import Told, send
from tests.evaluations import fixed_samples, promotion_config, register_version
from tests.made_up import values_of
from tests.tasks.registry.champions import make_champions, samples_of

DAYS = 10
NOT_ENDED = "its flow run, or that of its sweep, has not ended"
LONG_AGO = time.time() - 2 * DAYS * 86_400


@pytest.fixture(autouse=True)
def storage(tmp_path: Path, embed_mlflow: Callable[[Path], None], monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    monkeypatch.setenv("GRPO_STORAGE", str(tmp_path / "storage"))
    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)
    monkeypatch.chdir(tmp_path)
    embed_mlflow(tmp_path / "storage")
    yield tmp_path / "storage"
    mlflow.set_tracking_uri(None)


def make_run(name: str, version: tuple[str, str] | None = None, text: str = "", output: str = "training") -> Path:
    """An old run, of whose training this version of a model was made."""
    run = storage_root() / "runs" / name
    training = run / output
    training.mkdir(parents=True)
    (training / "weights").write_bytes(bytes(4096))
    (run / "config.toml").write_text(text)
    client = connect()
    run_id = client.get_model_version(*version).run_id if version else client.create_run("0").info.run_id
    (training / "mlflow.json").write_text(json.dumps({"run_id": run_id, "experiment_id": "0"}))
    age(run)
    return run


def make_weights(run: Path) -> Path:
    """The logged model of a run's training; returns its folder."""
    known = json.loads((run / "training" / "mlflow.json").read_text())
    model = connect().create_logged_model("0", "model", known["run_id"])
    folder = Path(model.artifact_location.removeprefix("file://"))
    folder.mkdir(parents=True)
    (folder / "weights").write_bytes(bytes(8192))
    return folder


def make_sweep(name: str) -> Path:
    folder = storage_root() / "sweeps" / name
    folder.mkdir(parents=True)
    for file in (".lock", "trials.json"):
        (folder / file).touch()
    age(folder)
    return folder


def age(folder: Path) -> None:
    for path in [folder, *folder.rglob("*")]:
        os.utime(path, (LONG_AGO, LONG_AGO))


def run_clean(dry_run: bool = False, going_on: Collection[str] = (), days: float = DAYS) -> dict[str, str]:
    """Why each item is kept, by name; "" if it is removed."""
    found = {item.name: item.kept for item in clean(days, dry_run, going_on)}
    return {name: why for name, why in found.items() if "vLLM" not in name}


def runs() -> set[str]:
    return {path.name for path in (storage_root() / "runs").iterdir()}


@pytest.mark.slow
def test_versions_with_an_alias_a_rollback_or_an_approval_before_them_are_kept_with_all_that_these_need() -> None:
    make_champions("sums", 3)
    register_version("sums", samples_of(base=0, trained=9))  # the candidate
    asked = register_version(
        "asked", fixed_samples({"base": [0] * 40, "trained": [1] * 40}), config=promotion_config(approval=True)
    )
    connect().delete_registered_model_alias("asked", "candidate")
    assert promote("asked", asked).decision == "waiting"
    for number in "1234":
        make_run(f"night.{number}", ("sums", number))
    make_run("waiting", ("asked", asked), text='base = "storage/runs/read/training/model"')
    make_run("read")
    make_run("read.2")
    make_run("arm.1", ("sums", "3"), text=tomli_w.dumps({"registry": {"sweep": "arm"}}))
    make_run("arm.2", text=tomli_w.dumps({"registry": {"sweep": "arm"}}))
    make_sweep("arm")
    make_sweep("gone")
    assert run_clean() == {
        "runs/arm.1": "sums version 3 has the alias champion",
        "runs/arm.2": "arm.1, of the same sweep, is kept",
        "runs/night.1": "",
        "runs/night.2": "a rollback of sums returns to version 2",
        "runs/night.3": "sums version 3 has the alias champion",
        "runs/night.4": "sums version 4 has the alias candidate",
        "runs/read": "waiting names its files",
        "runs/read.2": "",
        "runs/waiting": "asked version 1 waits for approval",
        "sweeps/gone": "",
    }
    assert runs() == {"arm.1", "arm.2", "night.2", "night.3", "night.4", "read", "waiting"}
    with pytest.raises(PromotionError, match="version 1 has no weights any more: `grpo clean` removed them on"):
        promote("sums", "1")
    assert rollback("sums") == ("3", "2")
    with pytest.raises(PromotionError, match="no champion before version 2 that still exists"):
        rollback("sums")


@pytest.mark.slow
def test_of_a_run_that_goes_the_figures_and_the_evaluation_stay(storage: Path) -> None:
    client = connect()
    for _ in range(2):
        register_version("sums", samples_of(base=0, trained=9))
    run = make_run("night", ("sums", "1"))
    run_id = client.get_model_version("sums", "1").run_id
    client.log_metric(run_id, "reward", 0.5)
    weights = make_weights(run)
    for of_run in (run_id, client.create_run("0").info.run_id):
        send([Told("rollout", [of_run, n], "1+1=", [], (1, 1), {}, {}, 0, of_run) for n in range(101)], "0")
    size = next(item.size for item in clean(DAYS, True, ()))
    assert size >= 4096 + 8192 and run.exists() and weights.exists(), "a dry run removes nothing"
    assert run_clean() == {"runs/night": ""}
    assert not run.exists() and not weights.exists()
    left = client.get_run(run_id)
    assert left.data.metrics == {"reward": 0.5} and "removed" in left.data.tags
    assert client.list_artifacts(run_id, "registered/this/evaluation")
    assert "record" in client.get_model_version("sums", "1").tags
    assert not client.search_traces(locations=["0"], run_id=run_id)
    assert len(client.search_traces(locations=["0"], max_results=500)) == 101


def test_what_has_changed_or_is_at_work_stays_and_replaced_outputs_go(storage: Path) -> None:
    young, busy = make_run("young"), make_run("busy")
    make_run("again", output="replaced/training-0123456789ab")
    read = make_run("read", output="replaced/training-0123456789ab")
    (young / "config.toml").write_text('adapter = "storage/runs/read/replaced/training-0123456789ab/adapter"')
    os.utime(young / "training")
    (storage / "runs" / "again" / "plan.json").touch()
    with locked(busy):
        found = run_clean()
    assert found == {
        "runs/again/replaced/training-0123456789ab": "",
        "runs/busy": "a process works on it",
        "runs/read": "young names its files",
    }
    assert runs() == {"young", "busy", "again", "read"} and [*(read / "replaced").iterdir()]
    assert run_clean() == {"runs/busy": "", "runs/read": "young names its files"}


def test_what_a_run_or_a_sweep_at_work_needs_stays_however_old(storage: Path) -> None:
    make_run("base")
    (storage.parent / "link").symlink_to(storage / "runs" / "base" / "training")
    busy = make_run("busy", text='[model]\nname_or_path = "link/model"')
    for name in ("arms.1", "arms.2", "gone.1"):
        make_run(name, text=f'[registry]\nsweep = "{name[:-2]}"')
    sweep, gone = (make_sweep(name) for name in ("arms", "gone"))
    with locked(busy), locked(sweep):
        expected = {
            "runs/base": "busy names its files",
            "runs/busy": "a process works on it",
            "runs/arms.1": NOT_ENDED,
            "runs/arms.2": NOT_ENDED,
            "runs/gone.1": "",
            "sweeps/gone": "",
        }
        assert run_clean(dry_run=True) == expected
        assert run_clean() == expected
    assert runs() == {"base", "busy", "arms.1", "arms.2"} and sweep.exists() and not gone.exists()


def test_what_prefect_goes_on_with_stays_with_all_that_it_needs(storage: Path) -> None:
    make_run("base")
    make_run("suspended", text='[model]\nname_or_path = "storage/runs/base/training/model"')
    make_run("arms.1", text='[registry]\nsweep = "arms"')
    sweep = make_sweep("arms")
    expected = {"runs/arms.1": NOT_ENDED, "runs/base": "suspended names its files", "runs/suspended": NOT_ENDED}
    assert run_clean(going_on={"suspended", "arms"}) == expected
    assert runs() == {"base", "suspended", "arms.1"} and sweep.exists()


def test_what_is_no_run_stays_and_what_cannot_be_read_or_moved_keeps_no_other_run(storage: Path) -> None:
    notes = [storage / folder / "notes of a person" for folder in ("runs", "sweeps")]
    for folder in notes:
        folder.mkdir(parents=True)
        (folder / "diary").touch()
        age(folder)
    elsewhere = make_run("night").rename(storage.parent / "elsewhere")
    (storage / "runs" / "linked").symlink_to(elsewhere)
    make_run("damaged", text="[registry\n")
    for name, file in (("closed", "config.toml"), ("locked", "training/mlflow.json")):
        (unreadable := make_run(name) / file).unlink()
        unreadable.mkdir()  # root may read any file
        age(unreadable.parent)
    make_run("gone")
    found = run_clean()
    assert "mlflow.json" in found.pop("runs/locked")
    assert found == {
        "runs/closed": "its config.toml cannot be read",
        "runs/damaged": "its config.toml cannot be read",
        "runs/gone": "",
        "runs/linked": "it is a link to another folder",
    }
    assert runs() == {"notes of a person", "linked", "damaged", "closed", "locked"} and notes[1].exists()
    assert (elsewhere / "training" / "weights").exists()


def test_a_run_that_names_another_s_files_while_it_is_looked_at_keeps_it(monkeypatch: pytest.MonkeyPatch) -> None:
    make_run("base")

    def look(*arguments: Any) -> str:
        if "new" not in runs():
            make_run("new", text='[model]\nname_or_path = "storage/runs/base/training/model"')
            os.utime(storage_root() / "runs" / "new" / "config.toml")
        return needed(*arguments)

    needed = cleaning._needed_in_mlflow
    monkeypatch.setattr(cleaning, "_needed_in_mlflow", look)
    assert run_clean() == {"runs/base": "new names its files"}


@pytest.mark.slow
def test_versions_that_a_person_made_of_a_run_s_weights_keep_it() -> None:
    client = connect()
    run = make_run("night")
    weights = make_weights(run)
    client.create_registered_model("prod")
    client.create_model_version("prod", str(weights))
    client.set_registered_model_alias("prod", "live", "1")
    assert run_clean() == {"runs/night": "prod version 1 has the alias live"}
    assert run.exists() and weights.exists()


def test_a_dry_run_leaves_what_a_call_that_was_ended_has_left(storage: Path) -> None:
    left = storage / "trash" / "0" / "night"
    left.parent.mkdir(parents=True)
    make_run("night").rename(left)
    run_clean(dry_run=True)
    assert left.exists()
    run_clean()
    assert not left.exists()


def test_a_time_to_come_is_refused() -> None:
    make_run("night")
    with pytest.raises(GrpoError, match="keep_days is -1"):
        next(clean(-1, False, ()))


def test_a_run_whose_mlflow_run_is_elsewhere_stays() -> None:
    run = make_run("night")
    (run / "training" / "mlflow.json").write_text(json.dumps({"run_id": "0" * 32, "experiment_id": "0"}))
    age(run)
    assert "is not at sqlite:" in run_clean()["runs/night"]
    assert run.exists()


def test_a_gguf_file_s_checkpoint_goes_once_no_run_that_is_left_names_it_and_none_has_just_asked_for_it(
    storage: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (storage.parent / "asked.gguf").touch()
    monkeypatch.setattr(base_model, "_write_checkpoint", lambda _, folder: (folder / "weights").mkdir(parents=True))
    keys = {"name_or_path": str(storage.parent), "gguf_file": "asked.gguf"}
    config = parse_config(values_of("asked", model=keys))
    asked = with_checkpoint(config, print).model.name_or_path
    bases = Path(asked).parent
    for name in ("kept", "gone", "unfinished.partial", "notes of a person"):
        (bases / name / "weights").mkdir(parents=True)
    for name in ("kept", "gone"):
        (bases / name / ORIGIN).touch()
        make_run(name, text=tomli_w.dumps({"model": {"name_or_path": str(bases / name)}}))
    assert not [name for name in run_clean(dry_run=True, days=0) if name.startswith("bases/")], "of today"
    age(bases)
    os.utime(storage / "runs" / "kept" / "training")
    assert with_checkpoint(config, print).model.name_or_path == asked
    with holding(descriptor := os.open(bases, os.O_RDONLY)):
        assert lock(descriptor)
        assert run_clean(dry_run=True) == {"runs/gone": ""}, "a process makes one"
    expected = {"runs/gone": "", "bases/gone": "", "bases/unfinished.partial": ""}
    assert run_clean(dry_run=True) == expected == run_clean()
    assert {it.name for it in bases.iterdir()} == {Path(asked).name, "kept", "notes of a person"}


class CutOff(BaseException):
    """Raised just before an operation on files."""


@pytest.fixture(scope="module")
def cut_off() -> list[int]:
    """As long as its one entry is positive, each operation counts it down; at 0, it is cut off."""
    left = [0]

    def count(event: str, arguments: tuple[Any, ...]) -> None:
        if left[0] and event in ("os.remove", "os.rename", "os.rmdir", "os.mkdir"):
            left[0] -= 1
            if not left[0]:
                raise CutOff

    sys.addaudithook(count)
    return left


@pytest.mark.slow
def test_wherever_it_is_cut_off_a_run_is_whole_or_gone_and_the_next_call_removes_the_rest(
    storage: Path, cut_off: list[int]
) -> None:
    client = connect()
    register_version("sums", samples_of(base=0, trained=9))
    client.delete_registered_model_alias("sums", "candidate")
    for place in itertools.count(1):
        run = make_run("night", ("sums", "1"))
        weights = make_weights(run)
        cut_off[0] = place
        try:
            run_clean()
        except CutOff:
            pass
        else:
            break
        if run.exists():
            assert (run / "training" / "weights").exists() and (weights / "weights").exists()
            assert "removed" not in client.get_model_version("sums", "1").tags
        assert run_clean() in ({}, {"runs/night": ""})
        assert not run.exists() and not weights.exists() and not [*(storage / "trash").iterdir()]
        client.delete_model_version_tag("sums", "1", "removed")
    cut_off[0] = 0
    assert place > 8


def test_what_killed_engines_left_goes_unless_a_process_uses_it(monkeypatch: pytest.MonkeyPatch) -> None:
    folder = Path(tempfile.mkdtemp())  # a socket's path has at most 107 bytes
    monkeypatch.setattr(tempfile, "tempdir", str(folder))
    used, left = (SharedMemory(f"psm_{uuid.uuid4().hex[:8]}", create=True, size=4096) for _ in range(2))
    served, dead = (folder / str(uuid.uuid4()) for _ in range(2))
    server, ended = (socket.socket(socket.AF_UNIX) for _ in range(2))
    server.bind(str(served))
    ended.bind(str(dead))
    ended.close()
    left.close()
    segments = [Path("/dev/shm", it.name) for it in (used, left)]
    for path in (*segments, served, dead):
        os.utime(path, (LONG_AGO, LONG_AGO))
    assert {segments[1], dead} <= {*leftovers(LONG_AGO + 1)} and not {segments[0], served} & {*leftovers(LONG_AGO + 1)}
    assert not {segments[1], dead} & {*leftovers(LONG_AGO - 1)}
    server.close()
    left.unlink()
    used.close()
    used.unlink()
    shutil.rmtree(folder)
