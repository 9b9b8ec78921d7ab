"""What outputs follow from beside a run's own configuration, and its version: `python -m tests.behaviour` records it in
behaviour.json. Finished runs stay up to date as long as no version that they depend on is raised."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from grpo_core.config.base import flatten
from grpo_core.config.files import parse_config
from grpo_core.environments.registry import BUILTIN as ENVIRONMENTS
from grpo_core.environments.registry import VERSIONS, file_of
from grpo_core.fingerprint import BEHAVIOUR
from grpo_core.rewards.registry import BUILTIN
from tests.conftest import config_values

RECORD = Path(__file__).with_suffix(".json")
BUILTIN_REWARDS = Path(__file__).parents[1] / "grpo_core" / "rewards" / "builtin"

TEXTS = [
    "",
    "42",
    " The answer is 42. ",
    "1,042.50 and then \\boxed{\\frac{1}{2}}",
    "#### -0.5",
    "(B)",
    "<think>2 + 2</think><answer>4</answer>",
    "<answer>4</answer> <think>late</think>",
    '{"name": "Ada", "age": 36}',
    '```json\n{"name": 5}\n```',
    "one two three one two three one two three one two three",
    "The quick brown fox jumps over the lazy dog. It does so every day, and nobody knows why it would not rest.",
    "Der schnelle braune Fuchs springt über den faulen Hund, und niemand weiß, warum er es jeden Tag tut.",
    "答案是四十二。",
]
SCHEMA = json.dumps({"type": "object", "required": ["name"], "properties": {"name": {"type": "string"}}})
BOXES = [
    "",
    "[0, 0, 4, 4]",
    "[1, 1, 5, 5]",
    '[{"bbox_2d": [0, 0, 4, 4]}, {"bbox_2d": [6, 6, 8, 8]}]',
    "<box>(0,0),(4,4)</box>",
    "[4, 4, 0, 0]",
    "<think>[0, 0, 9, 9]</think><answer>[0, 0, 4, 2]</answer>",
]
ANSWERS = ["42", "0.5", "4", "B"]
CASES: dict[str, list[dict[str, Any]]] = {
    "exact_match": [{"answer": answer} for answer in ANSWERS],
    "normalized_match": [{"answer": answer} for answer in (*ANSWERS, "the answer is 42")],
    "multiple_choice": [{"answer": answer} for answer in ("A", "B")],
    "numeric_match": [*({"answer": it} for it in ("42", "1042.5", "4")), {"answer": "41", "tolerance": 1.0}],
    "count_match": [{"answer": it} for it in ("42", "4", "3", "1")],
    "box_iou": [{"completions": BOXES * 2, "answer": it} for it in ("[0, 0, 4, 4]", "[[6, 6, 8, 8], [0, 0, 4, 4]]")],
    "math_answer": [{"answer": answer} for answer in ("42", "1/2", "4")]
    + [{"answer": "41", "relative_tolerance": 0.1}],
    "json_schema": [{"schema": SCHEMA}],
    "format_regex": [{"pattern": pattern} for pattern in (r"<answer>\d+</answer>", r".*42.*")],
    "tags": [{}, {"tags": ["answer"]}],
    "length": [{"target": 10}],
    "length_band": [{"low": 10, "high": 30}],
    "char_length": [{"target": 20}],
    "soft_overlong_punishment": [{"max_completion_len": 60, "soft_punish_cache": 40}],
    "language": [{"language": language} for language in ("en", "de", "zh")],
    "repetition": [{}, {"n": 2}],
    "distinct_n": [{"minimum": 4}],
    "self_repetition": [{}],
    "rouge": [{"reference": "The lazy dog rests every day.", "kind": kind} for kind in ("rouge1", "rougeL")],
    "readability": [{"low": 80.0, "high": 110.0}],
}
"""Arguments of each reward; texts for one row are repeated for all."""

SOURCES = {  # what they give follows from a model, a server, a program or an environment: recorded by their source
    "unit_tests": ("code.py", "code_tests.py"),
    "classifier": ("classifier.py",),
    "judge": ("judge.py", "judge_client.py"),
    "environment": ("environment.py",),
}


def present() -> dict[str, dict[str, Any]]:
    """The version of each part, and what it gives."""
    rewards = {name: {"version": record.version, "gives": _given(name)} for name, record in BUILTIN.items()}
    environments = {name: {"version": VERSIONS[name], "gives": _hash([file_of(name)])} for name in ENVIRONMENTS}
    required = flatten(config_values(Path("model"), Path("data")))
    defaults = flatten(parse_config(config_values(Path("model"), Path("data"))).model_dump(mode="json"))
    own = {
        key: value
        for key, value in defaults.items()
        if key not in required and not key.startswith(("health.", "launch."))
    }
    return {**rewards, **environments, "defaults": {"version": BEHAVIOUR, "gives": own}}


def changed(name: str, recorded: dict[str, Any], now: dict[str, Any]) -> bool:
    """True if the part gives something else under the version that was recorded; a key may be new."""
    if recorded["version"] != now["version"]:
        return False
    if name == "defaults":
        return any(now["gives"].get(key, value) != value for key, value in recorded["gives"].items())
    return recorded["gives"] != now["gives"]


def recorded() -> dict[str, dict[str, Any]]:
    return json.loads(RECORD.read_text()) if RECORD.exists() else {}


def _given(name: str) -> Any:
    if name in SOURCES:
        return _hash([BUILTIN_REWARDS / file for file in SOURCES[name]])
    return [_values(BUILTIN[name].function, arguments) for arguments in CASES[name]]


def _values(function: Callable[..., Sequence[float | None]], arguments: dict[str, Any]) -> list[float | None]:
    rows = len(TEXTS)
    columns = {name: [value] * rows for name, value in arguments.items() if name in ("answer", "reference", "schema")}
    texts = {"completions": TEXTS, "completion_ids": [[*map(ord, text)] for text in TEXTS]}
    texts["prompts"] = ["Why 42?"] * rows
    taken = function.__code__.co_varnames[: function.__code__.co_argcount]
    given = {name: value for name, value in {**texts, **arguments, **columns}.items() if name in taken}
    return [None if value is None else round(value, 4) for value in function(**given)]


def _hash(files: Sequence[Path]) -> str:
    return hashlib.blake2b(b"".join(file.read_bytes() for file in files), digest_size=8).hexdigest()


def main() -> None:
    now, before = present(), recorded()
    if wrong := [name for name in now if name in before and changed(name, before[name], now[name])]:
        raise SystemExit(f"{', '.join(wrong)}: raise the version first")
    lines = (f"  {json.dumps(name)}: {json.dumps(entry)}" for name, entry in now.items())
    RECORD.write_text("{\n" + ",\n".join(lines) + "\n}\n")


if __name__ == "__main__":
    main()
