"""The judge's cache: shared by processes, whole after whatever happens to them, and never wrong without a word."""

from __future__ import annotations

import json
import os
import sqlite3
import subprocess
import sys
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

from grpo_core.errors import RewardError
from grpo_core.rewards.builtin.judge_cache import open_cache
from tests.grpo_core.rewards.judging import by_length, completed, contents, judging

ROUNDS = 200
UNLIMITED = {"requests": None, "tokens": None}

# Each opens the cache once per round, as each call of a reward does, and all of them start with no file there.
WRITER = f"""
import sys
from pathlib import Path
from grpo_core.rewards.builtin.judge_cache import open_cache
folder, name = Path(sys.argv[1]), sys.argv[2]
print("ready", flush=True)
sys.stdin.readline()
for number in range({ROUNDS}):
    with open_cache(folder) as cache:
        cache.count_request({UNLIMITED})
        cache.keep(f"{{name}}-{{number}}", f"by {{name}}")
        cache.keep("shared", f"by {{name}}")
        cache.count_tokens(3)
"""


@pytest.mark.slow
def test_processes_that_write_at_once_lose_nothing(tmp_path: Path) -> None:
    started = [
        subprocess.Popen(
            [sys.executable, "-c", WRITER, str(tmp_path / "cache"), name],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        for name in "ab"
    ]
    for process in started:
        assert process.stdout and process.stdout.readline() == "ready\n"
    for process in started:
        assert process.stdin
        process.stdin.write("go\n")
        process.stdin.flush()
    for process in started:
        process.communicate()
        assert process.returncode == 0
    found = contents(tmp_path / "cache")
    assert found["requests"] == 2 * ROUNDS
    assert found["tokens"] == 6 * ROUNDS
    assert found["shared"] in ("by a", "by b")
    assert {found[f"{name}-{number}"] for name in "ab" for number in range(ROUNDS)} == {"by a", "by b"}


def test_a_process_that_is_killed_in_a_transaction_has_changed_nothing(tmp_path: Path) -> None:
    with open_cache(tmp_path) as cache:
        cache.count_request(UNLIMITED)
    killed = f"""
import os, signal
from pathlib import Path
from grpo_core.rewards.builtin.judge_cache import open_cache
with open_cache(Path({str(tmp_path)!r})) as cache, cache._transaction():
    cache._add("requests", 1)
    os.kill(os.getpid(), signal.SIGKILL)
"""
    assert subprocess.run([sys.executable, "-c", killed], check=False).returncode == -9
    with open_cache(tmp_path) as cache:
        cache.count_request({"requests": 2, "tokens": None})
        with pytest.raises(RewardError, match="budget of 2 requests is spent"):
            cache.count_request({"requests": 2, "tokens": None})
    assert contents(tmp_path) == {"requests": 2}


def test_a_half_made_cache_of_a_killed_process_is_in_nobodys_way(tmp_path: Path) -> None:
    (tmp_path / ".judge.killed").mkdir()
    (tmp_path / ".judge.killed" / "judge.sqlite").write_bytes(b"SQLite fo")
    with open_cache(tmp_path) as cache:
        cache.keep("a", "Score: 1")
        assert cache.answer("a") == "Score: 1"


@pytest.mark.parametrize("text", ["", "\ud83d alone\nScore: 10", "a\x00b\nScore: 10", "é 雪 🎉\nScore: 10"])
def test_every_text_is_kept_as_it_is(tmp_path: Path, text: str) -> None:
    with open_cache(tmp_path) as cache:
        cache.keep("a", text)
    with open_cache(tmp_path) as cache:
        assert cache.answer("a") == text
        assert cache.answer("b") is None


@pytest.mark.slow
def test_a_grade_beside_half_a_surrogate_pair_is_kept(graded: Any) -> None:
    answer = json.dumps(completed("\ud83d fine.\nScore: 10")).encode()
    with judging(lambda *_: (200, json.loads(answer))) as server:
        assert graded(server.url, "a") == [1]
        assert graded(server.url, "a") == [1]
        assert len(server.questions) == 1


def _truncate(file: Path) -> None:
    os.truncate(file, file.stat().st_size // 2)


def _empty(file: Path) -> None:
    os.truncate(file, 0)


def _overwrite(file: Path) -> None:
    file.write_bytes(b"not a database" * 1000)


def _damage_a_page(file: Path) -> None:
    data = bytearray(file.read_bytes())
    data[4096:] = b"\xff" * (len(data) - 4096)  # the first page, with the schema, is sound
    file.write_bytes(data)


def _damage_an_answer(file: Path) -> None:
    with closing(sqlite3.connect(file)) as database, database:
        database.execute("UPDATE answers SET answer = 'Score: 10'")  # no JSON


@pytest.mark.slow
@pytest.mark.parametrize("damage", [_truncate, _empty, _overwrite, _damage_a_page, _damage_an_answer])
def test_a_damaged_cache_is_named_with_the_way_out_and_nothing_is_asked(
    graded: Any, tmp_path: Path, damage: Any
) -> None:
    file = tmp_path / "cache" / "judge.sqlite"
    with judging(by_length) as server:
        graded(server.url, "a", "b")
        damage(file)
        with pytest.raises(RewardError) as error:
            graded(server.url, "a")
        said = str(error.value)
        assert said.startswith(f"cache='{file.parent}': judge.sqlite is damaged (")
        assert f"remove {file}* and run again" in said
        assert len(server.questions) == 2
        for path in file.parent.glob("judge.sqlite*"):
            path.unlink()
        assert graded(server.url, "a", "c") == [0, 0]
        assert len(server.questions) == 4


def test_a_cache_that_may_not_be_written_is_named(graded: Any, tmp_path: Path) -> None:
    with judging(by_length) as server:
        graded(server.url, "a")
        with closing(sqlite3.connect(tmp_path / "cache" / "judge.sqlite")) as database, database:
            database.execute("CREATE TRIGGER full BEFORE INSERT ON costs BEGIN SELECT RAISE(FAIL, 'disk is full'); END")
        with pytest.raises(RewardError, match=r"cache='.*/cache' cannot be used: disk is full; name a folder"):
            graded(server.url, "b")
        assert len(server.questions) == 1
