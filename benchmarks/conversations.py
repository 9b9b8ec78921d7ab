"""Compares conversations that continue as soon as their tool has answered with turn-by-turn batching.

    python -m benchmarks.conversations [--engine transformers] [--conversations 64] [--rounds 3] [--hidden 64]

Each conversation has 1 to 6 turns of 8 to 64 tokens; between two turns a tool answers after 0 to 500 ms with 8 to 32
tokens. Lengths and waits are drawn once; tokens are sampled by the real engine from a random model of two layers, and
tools wait in real processes. Turn by turn, all conversations sample a turn together, then their tools are called: one
after another, as TRL 1.16 does, or concurrently. The ways take turns. The tokens have to be the same.

The gain is saved waiting time: the longer sampling takes compared with the tools, as with a larger model on a CPU, the
smaller the gain.
"""

from __future__ import annotations

import argparse
import os
import random
import statistics
import tempfile
import time
from collections.abc import Callable, Generator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from benchmarks.workload import FIRST, Workload, write
from grpo_core.config.environment import EnvironmentConfig
from grpo_core.config.files import parse_config
from grpo_core.environments.conversation import Question, Sampled, Turn
from grpo_core.environments.processes import Environment, Environments
from grpo_core.rollout.conversations import _request, play
from grpo_core.rollout.types import Engine, Sampling

TURNS, LENGTHS, ANSWERS, MILLISECONDS = (1, 6), (8, 64), (8, 32), (0, 500)  # at least, at most
PROMPTS = (16, 128)
SECONDS = 30.0  # of one answer

Talk = Generator[Turn | Question, Any, list[list[int]]]


class Waiting:
    """An environment with a slow tool."""

    def reset(self, **row: object) -> None:
        pass

    def wait(self, milliseconds: int) -> str:
        """Waits.

        Args:
            milliseconds: How long.
        """
        time.sleep(milliseconds / 1000)
        return ""


def main() -> None:
    parser = argparse.ArgumentParser(description=str(__doc__).partition("\n")[0])
    parser.add_argument("--engine", choices=["transformers", "vllm"], default="transformers")
    parser.add_argument("--conversations", type=int, default=64)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--hidden", type=int, default=64, help="width of the model; default 64")
    options = parser.parse_args()
    count = options.conversations
    environments = Environments(EnvironmentConfig(environment_factory="benchmarks.conversations:Waiting"))
    ways: dict[str, Callable[..., list[list[list[int]]]]] = {
        "turn by turn, one tool after another": partial(turn_by_turn, at_once=1),
        "turn by turn, tools concurrently": partial(turn_by_turn, at_once=count),
        "as they answer": together,
    }
    seconds: dict[str, list[float]] = {way: [] for way in ways}
    said: list[list[list[int]]] | None = None
    with tempfile.TemporaryDirectory() as scratch:
        engine = load_engine(options.engine, options.hidden, Path(scratch, "workload"))
        held = [environments.take() for _ in range(count)]
        for environment in held:
            environment.ask({"do": "reset", "environment": "", "seed": 0, "row": {}}, SECONDS)
            _value(environment.answer(SECONDS))
        for way in ways.values():  # warm-up
            way(engine, [talk(which, held[which]) for which in range(min(8, count))])
        begun = time.process_time()
        for _ in range(options.rounds):
            for name, way in ways.items():
                talks = [talk(which, held[which]) for which in range(count)]
                start = time.perf_counter()
                found = way(engine, talks)
                seconds[name].append(time.perf_counter() - start)
                if said is not None and found != said:
                    raise SystemExit(f"{name}: other tokens")
                said = found
        cpu = time.process_time() - begun
        engine.close()
    environments.close()
    assert said is not None
    tokens = sum(len(ids) for turns in said for ids in turns)
    turns = sum(map(len, said))
    print(f"{options.engine}: {count} conversations, {turns} turns, {tokens:,} tokens, the same both ways")
    print(f"CPU seconds of the process per pass: {cpu / (len(ways) * options.rounds):.2f}")
    ours = statistics.median(seconds["as they answer"])
    for name, found_seconds in seconds.items():
        median = statistics.median(found_seconds)
        print(
            f"{name:37} {median:6.2f} s ({min(found_seconds):.2f} to {max(found_seconds):.2f}), "
            f"{count / median:5.1f} completions per second, {median / ours:5.2f} times the last's seconds"
        )
    print(f"load of {os.cpu_count()} cores: {os.getloadavg()[0]:.1f}")


def talk(which: int, environment: Environment) -> Talk:
    """Conversation for `play`; returns the tokens of each of its turns."""
    draw = random.Random(which)
    ids = _tokens(draw, PROMPTS)
    turns: list[list[int]] = []
    for number in range(draw.randint(*TURNS)):
        if number:
            milliseconds = draw.randint(*MILLISECONDS)
            request = {"do": "call", "name": "wait", "arguments": {"milliseconds": milliseconds}}
            _value((yield Question(environment, request, SECONDS)))
            ids = ids + _tokens(draw, ANSWERS)
        sampled: Sampled = yield Turn(ids, draw.randint(*LENGTHS), number)
        turns.append(sampled.ids)
        ids = ids + sampled.ids
    return turns


def together(engine: Engine, talks: Sequence[Talk]) -> list[list[list[int]]]:
    """Hold the conversations as a training does."""
    plays: Any = talks
    ended = [each for step in play(engine, plays, seeds_of(talks), sampling()) for each in step]
    found: Any = dict(ended)
    return [found[which] for which in range(len(talks))]


def turn_by_turn(engine: Engine, talks: Sequence[Talk], at_once: int) -> list[list[list[int]]]:
    """Hold the conversations with two barriers per turn: all sample, then tools answer, `at_once` of them at a time."""
    seeds, found = seeds_of(talks), dict[int, list[list[int]]]()
    waiting: dict[int, Turn | Question] = {which: next(each) for which, each in enumerate(talks)}

    def go_on(which: int, value: object) -> None:
        try:
            waiting[which] = talks[which].send(value)
        except StopIteration as end:
            del waiting[which]
            found[which] = end.value

    while waiting:
        turns = {which: step for which, step in waiting.items() if isinstance(step, Turn)}
        requests = [_request(turn, seeds[which]) for which, turn in turns.items()]
        places = [*turns]
        sampled = {places[number]: it for step in engine.generate(requests, sampling()) for number, (it,) in step}
        for which, it in sampled.items():
            go_on(which, Sampled(it.ids, it.logprobs, it.truncated))
        questions = [(which, step) for which, step in waiting.items() if isinstance(step, Question)]
        for first in range(0, len(questions), at_once):
            asked = questions[first : first + at_once]
            for _, question in asked:
                question.environment.ask(question.request, question.seconds)
            for which, question in asked:
                go_on(which, question.environment.answer(SECONDS))
    return [found[which] for which in range(len(talks))]


def seeds_of(talks: Sequence[Talk]) -> list[int]:
    return [1000 * which for which in range(len(talks))]


def sampling() -> Sampling:
    return Sampling(LENGTHS[1], temperature=1.0)


def load_engine(name: str, hidden: int, folder: Path) -> Engine:
    """Load a training's engine with a random model."""
    from grpo_core.data.prompts import load_tokenizer
    from grpo_core.model.loading import load_model
    from grpo_core.rollout.factory import make_engine

    shape = Workload(mode="generate", hidden=hidden, intermediate=2 * hidden, layers=2, heads=2, vocabulary=512)
    write(shape, folder)
    model = folder / "model"
    config = parse_config(
        {
            "name": "conversations",
            "model": {"name_or_path": str(model)},
            "data": {"train": "train.parquet", "eval": "eval.parquet"},
            "rewards": [{"function": "length", "args": {"target": 3}}],
            "rollout": {"engine": name, "num_generations": 8},
            "train": {"per_device_train_batch_size": 64, "max_steps": 1},
        }
    )
    longest = PROMPTS[1] + TURNS[1] * (LENGTHS[1] + ANSWERS[1])
    return make_engine(config, model, load_model(model), load_tokenizer(config.model), longest + 1)


def _value(answer: Mapping[str, Any] | None) -> Any:
    """Return an environment's answer. Raises KeyError if the environment failed."""
    return (answer or {})["value"]


def _tokens(draw: random.Random, lengths: tuple[int, int]) -> list[int]:
    return [draw.randrange(FIRST, 256) for _ in range(draw.randint(*lengths))]


if __name__ == "__main__":
    main()
