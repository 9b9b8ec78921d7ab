"""Environments that others have written, played by a scripted policy; a real server for OpenEnv."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from grpo_core.config.environment import EnvironmentConfig
from grpo_core.environments.conversation import Conversation, converse
from grpo_core.environments.processes import Environments
from grpo_core.environments.registry import EnvironmentsError
from grpo_core.rollout.conversations import play
from grpo_core.rollout.types import Sampling
from tests.grpo_core.environments.scripted import Scripted, call, turns

pytestmark = pytest.mark.served
FORMAT = turns()


def _hold(config: dict[str, Any], scripts: list[list[str]], rows: list[dict[str, Any]]) -> list[Conversation]:
    environments = Environments(EnvironmentConfig(**config, tool_timeout=60.0))
    try:
        data = [{"prompt": [{"role": "user", "content": f"#{place}"}], **row} for place, row in enumerate(rows)]
        plays = [converse(row, 11, 9000, environments, FORMAT) for row in data]
        found: dict[int, Conversation] = {}
        for ended in play(Scripted(scripts, FORMAT), plays, [0] * len(plays), Sampling(9000)):
            found |= dict(ended)
        assert [talk.said.failure for talk in found.values()] == [""] * len(rows)
        return [found[place] for place in range(len(rows))]
    finally:
        environments.close()


def _answers(talk: Conversation) -> list[str]:
    return [message["content"] for message in talk.said.messages if message["role"] == "tool"]


def test_reasoning_gym_asks_and_its_own_verifier_rewards() -> None:
    import reasoning_gym as gym

    task = gym.create_dataset("leg_counting", seed=7, size=1, min_animals=2)[0]
    other = gym.create_dataset("spell_backward", seed=3, size=1)
    right, wrong = json.dumps(task["answer"]), '"no idea"'
    scripts = [
        [call("answer", f'{{"text": {right}}}') + call("answer", f'{{"text": {wrong}}}'), "."],
        [call("answer", f'{{"text": {wrong}}}'), "."],
        ["I do not know."],
    ]
    config = {
        "environment_factory": "reasoning-gym",
        "environment_args": {"dataset": "leg_counting", "options": {"min_animals": 2}},
    }
    won, lost, silent = _hold(config, scripts, [{"seed": 7}, {"seed": 7}, {}])
    assert f"#0\n{task['question']}<|im_end|>" in FORMAT.tokenizer.decode(won.prompt_ids)
    assert _answers(won) == ["Handed in.", "Error: ValueError: an answer has been handed in already"]
    assert won.said.reward == 1.0 == other.score_answer(other[0]["answer"], other[0])
    assert lost.said.reward is not None and lost.said.reward < 0.1 and silent.said.reward == 0.0


@pytest.mark.e2e
def test_a_row_can_name_the_data_set_of_reasoning_gym() -> None:
    import reasoning_gym as gym

    (named,) = _hold({"environment_factory": "reasoning-gym"}, [["."]], [{"seed": 3, "dataset": "spell_backward"}])
    asked = gym.create_dataset("spell_backward", seed=3, size=1)[0]["question"]
    assert asked in FORMAT.tokenizer.decode(named.prompt_ids)


def test_textarena_plays_against_draws_that_follow_from_the_seed() -> None:
    config = {"environment_factory": "textarena", "environment_args": {"game": "TicTacToe-v0", "players": 2}}
    moves = [call("move", f'{{"action": "[{number}]"}}') for number in range(9)]
    keys = {"max_turns": 12}
    talks = _hold(
        config | keys, [[*moves, "."]] * 4 + [["."]], [{"seed": 5}, {"seed": 5}, {"seed": 6}, {"seed": 7}, {}]
    )
    assert talks[0].ids == talks[1].ids and talks[0].ids != talks[2].ids
    for talk in talks[:4]:
        last = _answers(talk)[-1]
        assert last in ("Error: ValueError: the game is over",) or "The game is over." in last
        assert talk.said.reward in (-1.0, 0.0, 1.0)
    assert talks[4].said.reward == -1.0
    assert {"Available Moves" in FORMAT.tokenizer.decode(talk.prompt_ids) for talk in talks} == {True}


@pytest.mark.e2e
def test_textarena_s_games_for_one_player_answer() -> None:
    alone = {"environment_factory": "textarena", "environment_args": {"game": "GuessTheNumber-v0"}}
    guesses = [call("move", f'{{"action": "[{number}]"}}') for number in (10, 5, 15, 3)]
    (talk,) = _hold(alone, [[*guesses, "."]], [{"seed": 1}])
    assert "higher" in _answers(talk)[0] or "lower" in _answers(talk)[0]


def test_a_missing_extra_is_named(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    for package in ("reasoning_gym", "textarena", "websockets"):
        (tmp_path / f"{package}.py").write_text("raise ImportError('not here')\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    for name in ("reasoning-gym", "textarena", "openenv"):
        with pytest.raises(EnvironmentsError, match=rf"install it: pip install -e '\.\[{name}\]'"):
            Environments(EnvironmentConfig(environment_factory=name, environment_args={"x": 1}))


@pytest.fixture
def server(tmp_path: Path) -> Iterator[str]:
    """The address of a server of OpenEnv's. GRPO_OPENENV_PYTHON: an interpreter that has openenv-core already."""
    python = os.environ.get("GRPO_OPENENV_PYTHON")
    if not python:
        folder = tmp_path / "venv"
        subprocess.run([sys.executable, "-m", "venv", str(folder)], check=True)
        python = str(folder / "bin" / "python")
        done = subprocess.run([python, "-m", "pip", "install", "--quiet", "openenv-core==0.3.0"], capture_output=True)
        assert done.returncode == 0, done.stderr
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    process = subprocess.Popen([python, str(Path(__file__).with_name("openenv_server.py")), str(port)])
    deadline = time.monotonic() + 120
    try:
        while True:
            assert process.poll() is None and time.monotonic() < deadline
            try:
                urllib.request.urlopen(f"http://127.0.0.1:{port}/health", timeout=10).close()
                break
            except OSError:
                time.sleep(0.1)
        yield f"http://127.0.0.1:{port}"
    finally:
        process.kill()
        process.wait()


@pytest.mark.e2e
def test_openenv_is_played_with_a_real_server(server: str) -> None:
    steps = [call("step", f'{{"action": {{"number": {number}}}}}') for number in (-1, 2, 4, 3, 5)]
    config = {"environment_factory": "openenv", "environment_args": {"url": server}}
    won, wrong, silent = _hold(
        config, [[*steps, "."], [call("step", '{"action": {"no": 1}}'), "."], ["."]], [{"seed": 13}, {"seed": 1}, {}]
    )
    shown = FORMAT.tokenizer.decode(won.prompt_ids)
    assert '"said": "a number from 0 to 9"' in shown
    answers = _answers(won)
    assert "no such number" in answers[0] and '"higher"' in answers[1] and '"lower"' in answers[2]
    assert answers[3].endswith("The episode is over.") and answers[4] == "Error: ValueError: the episode is over"
    assert won.said.reward == 0.5 and silent.said.reward == 0.0
    assert "number" in _answers(wrong)[0] and "Error" in _answers(wrong)[0]


@pytest.mark.e2e
def test_openenv_describes_the_servers_actions(server: str) -> None:
    environments = Environments(
        EnvironmentConfig(environment_factory="openenv", environment_args={"url": server}, tool_timeout=60.0)
    )
    step = environments.tools("")["step"]["function"]
    environments.close()
    assert '"number": {' in step["parameters"]["properties"]["action"]["description"]
    assert step["parameters"]["properties"]["action"]["type"] == "object"
