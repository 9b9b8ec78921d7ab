"""Rewards whose libraries come with an extra say how to install it; all others, and training, need none of them."""

from __future__ import annotations

import importlib.metadata
import json
import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

from grpo_core.rewards.registry import BUILTIN

# As where no extra is installed: the modules cannot be found. Then what each built-in reward makes of a completion.
WITHOUT = """
import json, sys
from grpo_core.rewards.registry import BUILTIN
for record in BUILTIN.values():
    for module in record.modules:
        sys.modules[module] = None
import grpo_core.train, grpo_core.evaluate
from grpo_core.errors import RewardError
from grpo_core.rewards.contract import check, resolve
from grpo_core.rewards.batch import Batch
from grpo_core.rewards.scoring import score
from grpo_core.config.inputs import RewardConfig

ARGUMENTS = {
    "format_regex": {"pattern": ".*"},
    "length": {"target": 3},
    "length_band": {"low": 1, "high": 3},
    "char_length": {"target": 3},
    "soft_overlong_punishment": {"max_completion_len": 4, "soft_punish_cache": 2},
    "readability": {"low": 1, "high": 3},
}
UNTRIED = {"classifier", "environment", "unit_tests"}  # they need a model, a conversation, a sandbox

def outcome(name):
    config = RewardConfig(function=name, args=ARGUMENTS.get(name, {}))
    try:
        check(config)
        reward = resolve(config)
        if name not in UNTRIED:
            score([reward], Batch([{"prompt": "p", "answer": "A"}], ["A"], [[1]]))
    except RewardError as error:
        return str(error)
    return ""

print(json.dumps({name: outcome(name) for name in BUILTIN}))
"""


@pytest.fixture(scope="module")
def outcomes() -> dict[str, str]:
    done = subprocess.run([sys.executable, "-c", WITHOUT], capture_output=True, text=True, check=True)
    return json.loads(done.stdout.splitlines()[-1])


@pytest.mark.slow
@pytest.mark.parametrize("name", BUILTIN)
def test_a_reward_without_its_libraries_names_the_command_that_installs_them(
    outcomes: dict[str, str], name: str
) -> None:
    expected = ""
    if (record := BUILTIN[name]).extra:
        needs = " and ".join(record.modules)
        command = f"pip install -e '.[{record.extra}]' in the folder of grpo-flows"
        expected = f"reward {name!r} needs {needs}, not installed here: {command}"
    assert outcomes[name] == expected


@pytest.mark.slow
def test_each_extra_installs_what_its_rewards_import() -> None:
    project = tomllib.loads((Path(__file__).parents[3] / "pyproject.toml").read_text())["project"]
    installed_by = importlib.metadata.packages_distributions()
    for record in BUILTIN.values():
        for module in record.modules:
            declared = {re.split(r"[^\w-]", it)[0] for it in project["optional-dependencies"][record.extra]}
            assert declared & {name.lower().replace("_", "-") for name in installed_by[module]}, (record, module)
