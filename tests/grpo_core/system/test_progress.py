"""A process says which phase it is in, whether it waits for others, and for how long it may stand still."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from grpo_core.system import progress
from grpo_core.system.progress import CHECKPOINT, FIRST, LOOP, PACE, Record, moved, phase, read_records, waiting

FLOOR = 10.0


class Rank:
    """This process as rank 1 of 2, under a clock that the test turns."""

    def __init__(self, folder: Path):
        self.folder, self.now = folder, 0.0

    def monotonic(self) -> float:
        return self.now

    def time(self) -> float:
        return 1000 + self.now

    @property
    def record(self) -> Record:
        [record] = read_records(self.folder)
        return record


@pytest.fixture
def rank(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Rank]:
    for name, value in {"RANK": "1", "WORLD_SIZE": "2", "GROUP_RANK": "1", progress.MACHINES: '["a", "b"]'}.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(progress, "_here", None)
    monkeypatch.setattr(progress, "time", rank := Rank(tmp_path))
    progress.start(tmp_path)
    progress.expect(FLOOR, {"rewards": 50.0})
    yield rank
    progress.faulthandler.unregister(progress.DUMP_SIGNAL)


def _of(record: Record, *names: str) -> list[Any]:
    return [getattr(record, name) for name in names]


def test_a_phase_is_named_within_the_one_around_it(rank: Rank) -> None:
    assert _of(rank.record, "rank", "ranks", "machine", "phase") == [1, 2, "b", "set-up"]
    with phase(LOOP):
        assert _of(rank.record, "phase", "limit") == ["loop", FLOOR]
        rank.now = 5.0
        with phase("evaluation"), phase("rewards", "judge"):
            assert _of(rank.record, "phase", "reward", "since") == ["evaluation/rewards", "judge", 1005.0]
        with pytest.raises(KeyError), phase("update"):
            raise KeyError
        assert _of(rank.record, "phase", "reward") == ["loop", ""]


def test_only_the_first_pass_through_a_phase_may_take_several_times_the_floor(rank: Rank) -> None:
    for factor in (FIRST, 1.0):
        with phase("update"):
            assert rank.record.limit == factor * FLOOR
    with pytest.raises(KeyError), phase("sampling"):
        raise KeyError
    with phase("sampling"):  # has not been passed through yet
        assert rank.record.limit == FIRST * FLOOR


def test_limits_follow_the_longest_stand_still_of_the_run_and_the_time_limits(rank: Rank) -> None:
    with phase("update"):
        for seconds in (3.0, 7.0, 2.0):
            rank.now += seconds
            moved()
    with phase("update"):
        assert rank.record.limit == PACE * 7
    for _ in range(2):
        with phase("evaluation"), phase("rewards"):
            pass
    with phase("evaluation"), phase("rewards"):
        assert rank.record.limit == 50.0


def test_waiting_for_others_says_nothing_of_a_process_s_own_pace(rank: Rank) -> None:
    with phase("update"), waiting():
        assert rank.record.waits
        rank.now += 1000
    assert progress.seconds_of_work() == {"set-up": 0.0, "update": 0.0}
    with phase("update"):
        assert _of(rank.record, "limit", "waits") == [FLOOR, False]
        rank.now += 4
    assert progress.seconds_of_work()["update"] == 4


def test_what_the_writer_of_a_checkpoint_waits_for_counts_while_the_training_waits_for_it(rank: Rank) -> None:
    waits, go_on = threading.Event(), threading.Event()

    def write() -> None:
        with phase("write"), waiting():  # not the main thread: no phase of the training's
            waits.set()
            go_on.wait()

    writer = threading.Thread(target=write)
    writer.start()
    waits.wait()
    with phase("update"):
        assert _of(rank.record, "phase", "waits") == ["update", False]
    with phase(CHECKPOINT):
        assert rank.record.waits
        go_on.set()
        writer.join()
        assert not rank.record.waits


def test_every_move_counts_and_is_written_at_least_each_second(rank: Rank) -> None:
    with phase("sampling"):
        before = rank.record.moves
        for _ in range(10):
            rank.now += 0.25
            moved()
            assert rank.now - 1.01 < rank.record.moved - 1000 <= rank.now
        assert before < rank.record.moves <= before + 10


def test_a_record_that_cannot_be_read_is_left_out(rank: Rank) -> None:
    (rank.folder / "0.json").write_text('{"rank": 0, "ranks"')
    (rank.folder / "2.json").write_text('{"rank": 2}')
    assert [record.rank for record in read_records(rank.folder)] == [1]


def test_a_full_disk_ends_nothing(rank: Rank, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: Any) -> None:
        raise OSError("no space")

    monkeypatch.setattr("os.pwrite", full)
    with phase("update"):
        moved()
