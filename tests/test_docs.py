"""The documentation is true: what it names exists, its links lead somewhere, its commands are taken."""

from __future__ import annotations

import ast
import json
import re
import tomllib
from collections import Counter
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from accelerate.state import AcceleratorState

from flows.cli.init import RECIPES
from flows.cli.reference_pages import keys_as_markdown
from grpo_core.config.files import describe_keys, load_config
from grpo_core.data.order import source_counts
from grpo_core.planning.hardware import named_gpu
from grpo_core.planning.memory import check_engine_memory, peak_memory
from grpo_core.planning.plan import make_plan, plan_inputs, source_table
from grpo_core.planning.shapes import PromptLengths
from grpo_core.rewards.registry import BUILTIN
from grpo_core.training.loop import train
from tests.command_line import fenced, grpo_commands, parse
from tests.conftest import config_values, make_run, with_keys
from tests.packing import source_files
from tests.qwen import planned

ROOT = Path(__file__).parents[1]
REFERENCE, EXPLANATION = ROOT / "docs" / "reference", ROOT / "docs" / "explanation"
RECIPE_PAGES = ROOT / "docs" / "tutorials" / "recipes"
KEYS = {key for key, *_ in describe_keys()}
SECTIONS = {key.partition(".")[0] for key in KEYS if "." in key}
PREFIXES = {key[: dot.start()] for key in KEYS for dot in re.finditer(r"\.", key)}
# Tags of a model version, and files, look like keys.
NO_KEYS = re.compile(
    r"promotion\.(decision|reason|at|against|gain|p_value|attempt|changes|rolled_back_\w+)|.*\.(parquet|jsonl?|md|py)"
)


def _pages() -> list[Path]:
    return [path for path in map(ROOT.joinpath, source_files("*.md")) if path.is_file() and not path.is_symlink()]


def _name(page: Path) -> str:
    return page.relative_to(ROOT).as_posix()


PAGES = pytest.mark.parametrize("page", _pages(), ids=_name)


@PAGES
def test_every_link_of_a_page_leads_somewhere(page: Path) -> None:
    broken = []
    for link in _links(page):
        name, _, anchor = link.partition("#")
        target = page.parent / name if name else page
        if not target.exists() or (anchor and anchor not in _anchors(target)):
            broken.append(link)
    assert broken == []


@PAGES
def test_the_head_of_every_table_of_a_page_has_a_line_of_its_own(page: Path) -> None:
    assert [line for line in page.read_text().splitlines() if "|---|" in line and line.strip(" |-:")] == []


@pytest.mark.slow
@PAGES
def test_every_command_of_a_page_is_one_that_the_command_line_takes(page: Path) -> None:
    for command in grpo_commands(page.read_text()):
        parse(command)


@PAGES
def test_every_configuration_key_that_a_page_names_exists(page: Path) -> None:
    text = page.read_text()
    named = set(re.findall(r"`(?:--set )?([a-z][a-z0-9_]*(?:\.[a-z0-9_]+)+)(?: ?=[^`]*)?`", text))
    named |= {key for block in fenced(text, "toml") for key in _keys_of(tomllib.loads(block))}
    named |= {text.partition("=")[0] for command in grpo_commands(text) for text in _overrides(command)}
    named = {re.sub(r"\.\d+(?=\.)", "", name) for name in named if name.partition(".")[0] in SECTIONS}
    assert {name for name in named if not (_is_key(name) or NO_KEYS.fullmatch(name))} == set()


def test_every_picture_is_shown_on_a_page() -> None:
    shown = {(page.parent / link).resolve() for page in _pages() for link in _links(page)}
    pictures = set((ROOT / "docs" / "images").glob("*.png"))
    assert pictures
    assert {path.name for path in pictures - shown} == set()


def test_the_page_of_the_configuration_is_what_make_reference_writes() -> None:
    assert (REFERENCE / "configuration.md").read_text() == keys_as_markdown(), "run `make reference`"


def test_every_row_of_the_comparison_with_trl_is_shown_by_tests_that_exist() -> None:
    shown_by = json.loads((ROOT / "tests" / "trl.json").read_text())
    source = "\n".join(path.read_text() for path in (ROOT / "tests").rglob("test_*.py"))
    named = {name for names in shown_by.values() for name in names}
    assert len(named) > 30 and all(shown_by.values())
    assert {name for name in named if f"def {name}(" not in source} == set()
    assert list(_comparison()) == list(shown_by)


def test_every_row_of_whose_code_is_reached_names_a_test_that_exists() -> None:
    table = (EXPLANATION / "security.md").read_text().partition("## What reaches whose code")[2].partition("\n## ")[0]
    rows = [line.split("|") for line in table.splitlines() if line.startswith("| ")][1:]
    assert len(rows) > 10
    for *_, named, _ in rows:
        file, _, test = named.strip(" `").partition("::")
        body = ast.parse((ROOT / file).read_text()).body
        (found,) = [node for node in body if isinstance(node, ast.FunctionDef) and node.name == test]
        assert any(map(_checks, ast.walk(found))), f"{test} checks nothing"
        marks = [node.value for node in body if isinstance(node, ast.Assign) and "pytestmark" in ast.unparse(node)]
        always = [node for node in found.body if isinstance(node, ast.Expr)]
        never = re.compile(r"\bpytest\.(mark\.)?(skip|xfail)\b|skipif\((True|1)\b")
        assert not never.search("\n".join(map(ast.unparse, [*found.decorator_list, *marks, *always]))), test


def _checks(node: ast.AST) -> bool:
    """True if the statement can fail: an assertion about more than a constant, or an error that is expected."""
    if isinstance(node, ast.Assert):
        return not isinstance(node.test, ast.Constant)
    return isinstance(node, ast.With) and "pytest.raises" in ast.unparse(node.items[0])


def test_the_comparison_with_trl_counts_its_verdicts() -> None:
    verdicts = Counter(_comparison().values())
    same, stricter, other, not_there = (verdicts[it] for it in ("same", "stricter", "other", "not in TRL"))
    said = f"{verdicts.total()} options: same in {same}, stricter in {stricter}, other in {other}, and {not_there}"
    assert f"{said} that are not in TRL" in (EXPLANATION / "trl.md").read_text()


@pytest.mark.parametrize(
    ("section", "page", "least"),
    [("algorithm", "algorithm", 30), ("health", "algorithm", 15), ("data.checks", "data", 9)],
)
def test_every_key_of_a_section_is_on_its_page(section: str, page: str, least: int) -> None:
    text = (REFERENCE / f"{page}.md").read_text()
    names = {name for place, _, name in (key.rpartition(".") for key in KEYS) if place == section}
    assert len(names) >= least
    assert {name for name in names if not re.search(rf"`{name}\b", text)} == set()


def test_every_built_in_reward_is_in_the_table_with_its_range() -> None:
    text = (REFERENCE / "rewards.md").read_text()
    table = dict(re.findall(r"^\| `(\w+)` \| (\S+ (?:to|or) \S+) \|", text, re.MULTILINE))
    documented = {name: tuple(map(_bound, re.split(" to | or ", shown))) for name, shown in table.items()}
    assert documented == {name: tuple(reward.range) for name, reward in BUILTIN.items()}


def test_the_counts_of_mixed_data_are_those_of_its_configuration() -> None:
    config, page = load_config(ROOT / "configs" / "mixed.toml"), ROOT / "docs" / "how-to" / "mixed-data.md"
    counts = source_counts(make_plan(plan_inputs(config, 3000, 308)), config.seed)
    lines = [line for line in page.read_text().splitlines() if line.startswith(("│", "┃"))]
    rows = [[cell.strip() for cell in line.strip("│┃").split(line[0])] for line in lines]
    assert rows == [*source_table(counts)]


def test_the_pages_tell_of_one_run_of_the_quickstart() -> None:
    """Its updates stand on two pages, its end on these and the README, and its report in the pictures."""
    tutorials = ROOT / "docs" / "tutorials"
    quickstart = (tutorials / "quickstart.md").read_text()
    told = re.findall(r"step (\d+)/80  reward ([\d.]+) .* entropy ([\d.]+) ", quickstart)
    rows = [line.strip("| ").split(" | ") for line in (tutorials / "reading-a-run.md").read_text().splitlines()]
    shown = {row[0].split(",")[0].strip("`"): row[1:] for row in rows if len(row) == 5}
    at = {update: place for place, update in enumerate(shown["a quickstart's update"])}
    assert [update for update, *_ in told] == ["1", "80"]
    for update, reward, entropy in told:
        for key, figure in ("reward", reward), ("entropy", entropy):
            assert float(shown[key][at[update]]) == pytest.approx(float(figure), abs=0.0051)
    (base, trained), (gain,) = (
        re.findall(r"base ([\d.]+)%, trained ([\d.]+)%", quickstart)[0],
        re.findall(r"base by ([\d.]+) points", quickstart),
    )
    assert float(gain) == pytest.approx(float(trained) - float(base))
    assert f"from {base} to {trained} %" in (tutorials / "reading-a-run.md").read_text()
    verdict = json.loads((ROOT / "docs" / "images" / "words.json").read_text())["verdict of report"]
    assert f"{base}% (base) → {trained}% (trained)" in verdict
    (end, start) = re.findall(
        r"answers (\d+) % of additions.*?instead of (\d+) %", (ROOT / "README.md").read_text(), re.S
    )[0]
    assert (float(start), float(end)) == pytest.approx((float(base), float(trained)), abs=0.5)


@pytest.mark.slow
@pytest.mark.parametrize("page", sorted(RECIPE_PAGES.glob("*.md")), ids=lambda page: page.stem)
def test_every_run_of_a_recipes_page_is_one_that_its_configuration_takes(page: Path) -> None:
    runs = _runs(page)
    assert runs
    for config, overrides in runs:
        load_config(ROOT / config, overrides)


@pytest.mark.slow
@pytest.mark.parametrize("recipe", RECIPES)
def test_a_recipes_gpu_form_is_what_its_configuration_marks_and_fits_a_gpu(recipe: str) -> None:
    """GPUs of 80 GB, by the forecast, with what vLLM takes of it and with room."""
    runs = _runs(RECIPE_PAGES / f"{recipe}.md")
    real = [run for run in runs if any(it.startswith("model.name_or_path=") for it in run[1])]
    [(path, overrides)] = [run for run in real if "train.sharding=full" not in run[1]]
    text = (ROOT / path).read_text()
    found = {key.rpartition(".")[2]: value for key, value in (override.split("=", 1) for override in overrides)}
    marked: dict[str, float] = {}
    for key, said in re.findall(r"^(?:(\w+) = .*)?# (?:.*; )?GPU: (.*)$", text, re.MULTILINE):
        numbers = re.findall(r"(?:^|(\w+) = )(\d[\d.e-]*)\b", said)
        marked |= {name or key: float(number) for name, number in numbers}
    assert {"max_completion_length", "per_device_train_batch_size", "gradient_accumulation_steps"} <= marked.keys()
    assert {name: float(found[name]) for name in marked} == marked
    assert "# GPU: mixed_precision" in text and found["mixed_precision"] == "bf16"
    elsewhere = ("rollout.engine", "rollout.gpu_memory_utilization")  # of a server; here vLLM is in the training
    config = load_config(
        ROOT / path, ["rollout.engine=vllm", *(it for it in overrides if not it.startswith(elsewhere))]
    )
    size = re.search(r"-([\d.]+B)\b", config.model.name_or_path)[1]
    run = planned(config, size, PromptLengths(256, 256, "assumed"), named_gpu("A100-SXM4-80GB"))
    check_engine_memory(run)
    assert peak_memory(run)["peak_memory_gib"] < 60


def test_a_recipes_forms_for_eight_gpus_fit_with_the_memory_that_the_page_says() -> None:
    """GPUs of 80 GB; without offload, 32B would not fit."""
    page = (RECIPE_PAGES / "maths.md").read_text()
    forms = [run for run in _runs(RECIPE_PAGES / "maths.md") if "train.sharding=full" in run[1]]
    assert ["7B" in str(overrides) for _, overrides in forms] == [True, False]
    assert ["32B" in str(overrides) for _, overrides in forms] == [False, True]
    small, large = ((path, [*overrides, "rollout.engine=vllm"]) for path, overrides in forms)
    said = re.search(r"forecasts (\d+) GiB on each of 8 .* 7B.* 32B it is (\d+), with (\d+) GiB", page, re.DOTALL)
    assert said
    found = [_memory(*run) for run in (small, large)]
    figures = [*(memory["peak_memory_gib"] for memory in found), found[1]["host_memory_gib"]]
    assert [round(figure) for figure in figures] == [int(number) for number in said.groups()]
    assert max(figures[:2]) < 60
    on_gpu = _memory(large[0], [*large[1], "train.offload=none"])
    assert "warning" in on_gpu


def _memory(path: str, overrides: list[str]) -> dict[str, Any]:
    """The forecast of memory, for prompts of 256 tokens. Raises an error for a run that would be refused."""
    config = load_config(ROOT / path, overrides)
    size = "7B" if "-7B" in config.model.name_or_path else "32B"
    run = planned(config, size, PromptLengths(256, 256, "assumed"), named_gpu("H100"))
    assert config.rollout.num_generations * 32 == run.plan.effective_batch_size
    check_engine_memory(run)
    return peak_memory(run)


def _runs(page: Path) -> list[tuple[str, list[str]]]:
    """What a page runs: the configuration and the keys that it sets."""
    runs = [parse(command) for command in grpo_commands(page.read_text()) if command[0] == "run"]
    return [(str(run["config"]), run["overrides"] or []) for run in runs]


@pytest.fixture
def values(model_folder: Path, tmp_path: Path) -> Iterator[dict[str, Any]]:
    yield config_values(model_folder, tmp_path)
    AcceleratorState._reset_state(reset_partial_state=True)


@pytest.mark.slow
def test_every_metric_of_a_training_is_documented(values: dict[str, Any], tmp_path: Path) -> None:
    keys = {"beta": 0.1, "eval_steps": 2, "dynamic_sample": True, "off_policy_mask_threshold": 0.1, "entropy_coef": 0.1}
    run = make_run(tmp_path / "run", with_keys(values, **keys))
    train(run, run / "training")
    text = (REFERENCE / "metrics.md").read_text()
    for line in (run / "training" / "metrics.jsonl").read_text().splitlines():
        names = {re.sub(r"rewards/\w+/", "rewards/NAME/", name) for name in json.loads(line)} - {"step"}
        assert {name for name in names if f"`{name}`" not in text} == set()


def _links(page: Path) -> Iterator[str]:
    """Where a page leads, except other sites."""
    text = re.sub(r"^ *```.*?^ *```", "", page.read_text(), flags=re.MULTILINE | re.DOTALL)
    for link in re.findall(r"\]\(([^)\s]+)\)", re.sub(r"`[^`\n]*`", "", text)):
        if not re.match(r"[a-z]+:", link):
            yield link


def _anchors(page: Path) -> set[str]:
    """The anchors that GitHub gives the headings of a page."""
    text = re.sub(r"^ *```.*?^ *```", "", page.read_text(), flags=re.MULTILINE | re.DOTALL)
    anchors: Counter[str] = Counter()
    found = set(re.findall(r'<a id="(.*?)"></a>', text))
    for heading in re.findall(r"^#+ +(.*?)(?: #*)?$", text, re.MULTILINE):
        words = re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", heading).lower()
        anchor = re.sub(r"[^\w\- ]", "", words).strip().replace(" ", "-")
        found.add(f"{anchor}-{anchors[anchor]}" if anchors[anchor] else anchor)
        anchors[anchor] += 1
    return found


def _bound(text: str) -> float:
    return float(text.replace("∞", "inf"))


def _is_key(name: str) -> bool:
    return name in KEYS | PREFIXES or name.startswith(
        ("rewards.args.", "environment.environment_args.", "data.columns.")
    )


def _keys_of(table: dict[str, Any], prefix: str = "") -> Iterator[str]:
    """The keys that TOML sets, without the numbers of a list's items."""
    for name, value in table.items():
        items = value if isinstance(value, list) else [value]
        if f"{prefix}{name}" in PREFIXES and all(isinstance(item, dict) for item in items):
            for item in items:
                yield from _keys_of(item, f"{prefix}{name}.")
        else:
            yield f"{prefix}{name}"


def _overrides(command: list[str]) -> list[str]:
    return [value for option, value in pairwise(command) if option == "--set"]


def _comparison() -> dict[str, str]:
    """The options of the comparison with TRL, and the verdict on each."""
    table = (EXPLANATION / "trl.md").read_text().partition("\n| option |")[2].partition("\n\n")[0]
    rows = [[cell.strip() for cell in row.strip("|").split(" | ")] for row in table.splitlines()[2:]]
    return {row[0]: row[1] for row in rows if not row[0].startswith("**")}
