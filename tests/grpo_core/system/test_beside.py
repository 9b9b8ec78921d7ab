"""What is imported from beside a configuration: named modules, and what they import from there."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from grpo_core.config.environment import EnvironmentConfig
from grpo_core.environments.processes import Environments
from grpo_core.system import beside
from tests.grpo_core.environments.scripted import call
from tests.grpo_core.environments.test_conversation import _hold

MINE = """
import importlib
from helping import double
def lazily():
    import later
    return later.value + importlib.import_module("latest").value
"""
SPAWNING = """
import multiprocessing
from helping import double
class Spawning:
    def reset(self, **row): ...
    def twice(self, number: int) -> int:
        '''Doubles.

        Args:
            number: What to double.
        '''
        with multiprocessing.get_context("spawn").Pool(1) as pool:
            return pool.apply(double, (number,))
"""
LIBRARY = "try:\n    import optional\nexcept ImportError:\n    optional = None\n"
NAMES = ("mine", "helping", "later", "latest", "optional", "some_library", "barn", "spawning")


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """With a library elsewhere that looks for the package `optional`, as libraries do."""
    (tmp_path / "installed").mkdir()
    (tmp_path / "installed" / "some_library.py").write_text(LIBRARY)
    monkeypatch.syspath_prepend(str(tmp_path / "installed"))
    here = tmp_path / "configs"
    (here / "barn").mkdir(parents=True)
    for name, text in {
        "mine": MINE,
        "helping": "import some_library\ndef double(number): return 2 * number\n",
        "later": "value = 3\n",
        "latest": "value = 4\n",
        "optional": "raise SystemExit('it was run')\n",
        "barn/tone": "from barn.kind import polite\nimport helping\n",
        "barn/kind": "polite = 1.0\n",
        "spawning": SPAWNING,
    }.items():
        (here / f"{name}.py").write_text(text)
    yield here
    for name in [name for name in sys.modules if name.partition(".")[0] in NAMES]:
        del sys.modules[name]


def test_a_named_module_and_what_it_imports_from_there_are_found(folder: Path) -> None:
    beside.search([str(folder)], ["mine", "barn.tone"])
    assert importlib.import_module("mine").double(2) == 4 and importlib.import_module("mine").lazily() == 7
    assert importlib.import_module("barn.tone").polite == 1.0


def test_libraries_find_nothing_there_not_even_those_that_a_named_module_imports(folder: Path) -> None:
    beside.search([str(folder)], ["mine"])
    assert importlib.import_module("mine") and sys.modules["some_library"].optional is None
    with pytest.raises(ModuleNotFoundError, match="'optional'"):
        importlib.import_module("optional")
    assert str(folder) not in sys.path


def test_what_was_inherited_is_forgotten_for_another_configuration(folder: Path) -> None:
    beside.search([str(folder)], ["mine"])
    beside.FINDER.forget()
    beside.inherit()
    assert beside.FINDER.folders == [str(folder)] and importlib.import_module("mine")
    beside.search(["/elsewhere"], ["barn"])
    assert beside.FINDER.folders == ["/elsewhere"]
    with pytest.raises(ModuleNotFoundError):
        importlib.import_module("spawning")


@pytest.mark.slow
def test_the_process_of_an_environment_and_those_that_it_spawns_find_the_same(folder: Path) -> None:
    beside.search([str(folder)], ["spawning"])
    environments = Environments(EnvironmentConfig(environment_factory="spawning:Spawning", tool_timeout=60.0))
    (talk,) = _hold(environments, [call("twice", '{"number": 21}'), "."])
    environments.close()
    assert talk.said.messages[1]["content"] == "42"
