"""Commands of the pages that answer in seconds are run, in the order in which a page has them, in a folder with the
files that it names; of all others, a table says what runs them or what they need."""

from __future__ import annotations

import re
import shlex
import shutil
from collections.abc import Iterator
from pathlib import Path

import polars as pl
import pytest
from typer.testing import CliRunner

from examples import tiny
from flows.cli.main import app
from tests.command_line import fenced
from tests.formats import GSM8K
from tests.made_up import made_up_run, metrics_of, outcomes_of, sampled, samples_of, values_of, write_sampled
from tests.rows import write_lines

ROOT = Path(__file__).parents[1]
PAGES = [ROOT / "README.md", *sorted(path for path in (ROOT / "docs").rglob("*.md") if path.stem != "commands")]
# Finished runs that pages name, and configurations of the reader's own.
RUNS = ("quickstart", "slower", "seed-1", "pairs", "smallest", "one-group", "mine", "faster", "gsm8k")
RUNS += ("rft", "longer", "again", "large")
READERS_OWN = ("mine.toml", "config.toml", "configs/mine.toml")
STALE = 1  # exit status of `grpo status NAME`: made-up runs have no lineage

# Commands, by page and first words, that are not run here, and why.
OF_A_TRAINING = "tests/e2e: it trains"
OF_SERVERS = "tests/served, tests/e2e: it needs servers"
ELSEWHERE = {
    "*: run": OF_A_TRAINING,
    "*: sweep": OF_A_TRAINING,
    "*: stage": OF_A_TRAINING,
    "*: up": OF_SERVERS,
    "*: worker": OF_SERVERS,
    "*: schedule": OF_SERVERS,
    "*: serve-model": "tests/flows/test_serve_model.py, tests/served: it needs a registered version",
    "*: promote": "tests/tasks/registry, tests/e2e/test_pages.py: it needs a registered version",
    "*: rollback": "tests/tasks/registry: it needs a champion",
    "*: clean": "tests/tasks/test_clean.py: it asks Prefect for the runs at work",
    "*: env try": "tests/test_readme.py",
    "*: compare arithmetic@champion": "tests/flows/test_compare.py: it needs a registered version",
    "your-first-run: rewards try": "tests/test_readme.py, on the rows that the page makes",
    "your-first-run: plan": "likewise",
    "first-gpu-run: data check": "the hub; the same columns are checked for own-data.md",
    "first-gpu-run: plan": "tests/flows/test_planning.py, without the hub",
    "data-formats: data check": "tests/tasks/data, tests/e2e/test_formats.py, with rows of each format",
    "mixed-data: data check mine": "its rows are the reader's; tests/e2e/test_recipes.py trains on several sources",
    "mixed-data: plan mine": "likewise",
    "scale: plan": "tests/grpo_core/planning/test_scale_page.py: it needs the model's config.json",
    "gpus: plan configs/maths": "tests/grpo_core/planning/test_scale_page.py: likewise",
    "teachers: plan": "tests/grpo_core/data/test_teacher.py, with these sizes; it needs each model's config.json",
    "plan: plan --recipe": "tests/flows/test_planning.py, with recipes of both",
    "from-swift: plan --recipe": "likewise",
    "from-swift: rewards try": "tests/tasks/data/test_pages.py, on rows of the page's form",
    "from-verl: rewards try": "likewise",
    "model-rewards: rewards try": "tests/e2e/test_recipes.py: it needs the recipe's reward model",
    "dialogue: rewards try": "likewise",
}


def _commands(page: Path) -> list[tuple[list[str], str]]:
    """The words of each `grpo …` in the page's shell blocks, and the file that it writes to, if any."""
    blocks = fenced(page.read_text(), "sh")
    lines = (line for block in blocks for line in block.replace("\\\n", " ").replace(" && ", "\n").splitlines())
    found = []
    for line in lines:
        if line.startswith("grpo "):
            words = shlex.split(line, comments=True)[1:]
            words, target = (words[: words.index(">")], words[-1]) if ">" in words else (words, "")
            found.append((words, target))
    return found


def _elsewhere(page: Path, words: list[str]) -> str | None:
    """The entry of ELSEWHERE that a command has."""
    said = " ".join(words)
    for entry in ELSEWHERE:
        where, _, first = entry.partition(": ")
        if where in ("*", page.stem) and (said == first or said.startswith((f"{first} ", f"{first}."))):
            return entry
    return None


HERE = [page for page in PAGES if any(not _elsewhere(page, words) for words, _ in _commands(page))]


def test_every_command_that_is_run_elsewhere_is_on_a_page() -> None:
    assert {_elsewhere(page, words) for page in PAGES for words, _ in _commands(page)} - {None} == ELSEWHERE.keys()
    assert len(HERE) > 12


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory, model_folder: Path) -> Path:
    """A project's folder, as the pages take it to be."""
    folder = tmp_path_factory.mktemp("project")
    shutil.copytree(ROOT / "configs", folder / "configs")
    examples = folder / "storage" / "examples"
    rows = pl.DataFrame({"prompt": [f"{n}+1=" for n in range(300)], "answer": [str(n + 1) for n in range(300)]})
    for recipe in ("arithmetic", "maths", "smallest"):
        (examples / recipe).mkdir(parents=True)
        (examples / recipe / "base").symlink_to(model_folder)
        for name in ("train", "eval"):
            rows.write_parquet(examples / recipe / f"{name}.parquet")
    for number, name in enumerate(RUNS):
        values = values_of(name, model={"name_or_path": str(model_folder)})
        samples = samples_of({"base": outcomes_of(0, 0.4), "trained": outcomes_of(number + 1, 0.8)})
        run = made_up_run(folder / "storage" / "runs" / name, values, samples, metrics_of())
        said = {"prompt": "12+30=", "completion": "42", "prompt_ids": [1, 2], "completion_ids": [3, 4, 5]}
        batches = [[sampled(step, 12, {"numeric_match": 1.0}, **said)] for step in range(1, 81)]
        write_sampled(run / "training", batches, 1)
    # What the pages on data name: rows of GSM8K, and a model that fits into a test under the names of theirs.
    tokenizer = tiny.make_tokenizer([])
    for name in ("Qwen2.5-0.5B-Instruct", "Qwen3.5-0.8B"):
        tokenizer.save_pretrained(folder / "Qwen" / name)
        tiny.make_model(tokenizer, context=1024).save_pretrained(folder / "Qwen" / name)
    for name, part in (("train", GSM8K[:8]), ("test", GSM8K[8:]), ("more", GSM8K[:8])):
        write_lines(folder / f"{name}.jsonl", part)
    return folder


@pytest.fixture
def here(folder: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    monkeypatch.chdir(folder)
    monkeypatch.setenv("GRPO_STORAGE", str(folder / "storage"))
    before = {path.name for path in folder.iterdir()}
    yield folder
    for path in {path for path in folder.iterdir() if path.name not in before}:
        shutil.rmtree(path) if path.is_dir() else path.unlink()


@pytest.mark.slow
@pytest.mark.parametrize("page", HERE, ids=lambda page: page.stem)
def test_the_quick_commands_of_a_page_do_what_it_says_in_its_order(page: Path, here: Path) -> None:
    for name, text in _files(page):
        (here / name).write_text(text)
    for name in READERS_OWN:
        if not (here / name).exists():
            shutil.copy(here / "configs" / "quickstart.toml", here / name)
    for words, target in _commands(page):
        if _elsewhere(page, words):
            continue
        done = CliRunner(env={"COLUMNS": "150"}).invoke(app, words)
        expected = {0, STALE} if words[0] == "status" else {0}
        assert done.exit_code in expected, f"grpo {shlex.join(words)}\n{done.output}{done.exception!r}"
        if target:
            (here / target).write_text(done.stdout)


def _files(page: Path) -> list[tuple[str, str]]:
    """The files that the page says to save, with their text."""
    named = re.compile(r"Save this as `([\w.]+)`.*?^```\w+\n(.*?)^```", re.MULTILINE | re.DOTALL)
    return named.findall(page.read_text())
