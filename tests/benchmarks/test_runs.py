"""Each benchmark that a page quotes runs, cut down, from its command line to its results."""

from __future__ import annotations

import os
import re
import shlex
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from unittest import mock

import pytest

from benchmarks.command import RESULTS, ROOT, python_path
from tests.held import held
from tests.needs import VLLM, needs
from tests.packing import source_files
from tests.quick_python import quick_python
from tests.serving import prefect_server

pytestmark = pytest.mark.served

OUT = "--tiny --output out"
# The commands of each test, and the files that they leave.
RUNS: list[tuple[str, str]] = [
    # One case of each kind: cut down, the others are like these.
    ("vs_trl --only memory threshold " + OUT, "out/*.json out/*.png"),
    ("vs_trl --gpu --only gpu-training-7B gpu-vllm " + OUT, "out/*.json out/*.png"),
    ("parity_trl --only gspo --output out/parity.json", "out/parity.json"),
    ("ablation --rounds 1 --tiny", ""),
    ("correction --samples 4 --rounds 1 " + OUT, "out/correction.json"),
    ("curriculum half --seeds 1 " + OUT, "out/curriculum.json out/curriculum.png"),
    ("decisions --trials 1 --output out/decisions.md", "out/decisions.md"),
    ("families --only qwen3_5_text rwkv --output out/models.md", "out/models.md"),
    ("four_bit --updates 1", ""),
    ("isolated --batches 1", ""),
    ("looks --trials 1 --output out/looks.md", "out/looks.md"),
    ("lost_weights copy --tiny", ""),
    ("recipes ms-swift=clone/.git --output out/recipes.md", "out/recipes.md"),
    ("records " + OUT, "out/records.json"),
    ("self_distillation --tiny", ""),
    ("seeds --trials 1 --output out/seeds.md", "out/seeds.md"),
    ("serving " + OUT, "out/serving.json"),
    ("sharded_memory --models 7B --gpus 8 --tiny", ""),
    ("sharding --turns 1 --rounds 1 --tiny", ""),
    ("staleness --simulate " + OUT, "out/staleness-simulated.json out/staleness-simulated.png"),
    ("staleness --real --ahead 0 1 --updates 1 --judge-seconds 0 " + OUT, "out/staleness-real.json"),
    (
        "staleness --learn quickstart --ahead 0 1 --updates 1 --seeds 1 " + OUT,
        "out/staleness-learning.json out/staleness-learning.png",
    ),
]
PIPELINES = [
    ("large_data --rows 16 --output out/large.json", "out/large.json"),
    ("reward_models --tiny && recipe_curves --record", "docs/images/*.png"),
]
NEEDS = {"vs_trl": VLLM, "serving": VLLM}
# In `make e2e`.
LONG = (
    "vs_trl",
    "parity_trl",
    "records",
    "serving",
    "sharded_memory",
    "staleness --real",
    "staleness --learn",
    "self_distillation",
    "lost_weights",
)
ELSEWHERE = {"gpu_check", "mutants"}  # test_gpu_check.py; Cosmic Ray is not installed here
# By these processes, and by those that they start. Not Prefect: it reads its settings when it is imported.
IMPORTED = (
    "benchmarks.side_ours",
    "benchmarks.side_trl",
    "grpo_core.evaluation.run",
    "grpo_core.rollout.transformers_engine",
    "grpo_core.rollout.vllm.colocated_engine",
    "grpo_core.rollout.vllm.server_engine",
    "grpo_core.rollout.vllm.worker",
    "grpo_core.training.loop",
    "matplotlib.pyplot",
    "mlflow.store.tracking.sqlalchemy_store",
    "pandera.polars",
    "peft",
    "tests.benchmarks.waiting_vllm",
    "tests.serving",
    "tests.conftest",
    "transformers.models.qwen2.modeling_qwen2",
    "trl.trainer.grpo_trainer",
    "vllm.entrypoints.llm",
    "vllm.entrypoints.openai.api_server",
    "vllm.lora.model_manager",
    "vllm.model_executor.models.qwen2",
    "vllm.v1.worker.cpu_worker",
)
# The examples as they are made, except for fewer rows and models that are hardly taught.
EXAMPLES = """
from pathlib import Path
from examples import tiny
from examples.arithmetic import make as sums
from examples.dialogue import make as dialogue

train, held_out = sums.make_rows()
tiny.run(sums.__file__, sums.make)
tiny.write_rows(Path("storage", "examples", "arithmetic"), train[:256], held_out[:16])

dialogue.TRAIN_ROWS, dialogue.EVAL_ROWS = 64, 16
dialogue.STEPS = dialogue.REWARD_STEPS = dialogue.WEAK_STEPS = 1
(folder := Path("storage", "examples", "dialogue")).mkdir()
dialogue.make(folder)
"""
# As outside of pytest, except that nothing is compiled.
VARIABLES = {name: value for name, value in os.environ.items() if not name.startswith(("PYTEST", "GRPO_STORAGE"))}
VARIABLES |= {"PYTHONPATH": python_path(ROOT), "TORCH_COMPILE_DISABLE": "1"}
RECIPE = "swift rlhf --rlhf_type grpo --model Qwen/Qwen2.5-0.5B --per_device_train_batch_size 4 --num_generations 4\n"


def quoted() -> set[str]:
    """Benchmarks that a page names, or runs by `make`."""
    text = "\n".join((ROOT / name).read_text() for name in source_files("*.md", "Makefile"))
    named = {*re.findall(r"\bbenchmarks[./](\w+)", text), *re.findall(r"^\| `(\w+)", text, re.MULTILINE)}
    return named & {path.stem for path in (ROOT / "benchmarks").glob("*.py")}


def test_every_benchmark_that_a_page_quotes_has_a_cut_down_run() -> None:
    assert len(quoted()) > 15
    assert quoted() - {line.split()[0] for lines, _ in [*RUNS, *PIPELINES] for line in lines.split(" && ")} == ELSEWHERE


@pytest.fixture(scope="module")
def place(python: str, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder like the project's, whose examples are made already."""
    place = tmp_path_factory.mktemp("place")
    (place / "configs").symlink_to(ROOT / "configs")
    (place / "docs" / "images").mkdir(parents=True)
    (place / "benchmarks" / "results").mkdir(parents=True)
    shutil.copy(RESULTS / "recipe-curves.json", place / "benchmarks" / "results")
    run([python, "-c", EXAMPLES], place)
    (place / "clone" / "examples").mkdir(parents=True)
    (place / "clone" / "examples" / "grpo.sh").write_text(RECIPE)
    git = ["git", "-C", str(place / "clone"), "-c", "user.name=us", "-c", "user.email=us@example.com"]
    for command in (["init", "--quiet"], ["add", "."], ["commit", "--quiet", "--message", "One recipe"]):
        subprocess.run([*git, *command], check=True)
    return place


@pytest.fixture(scope="module")
def prefect(python: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, str]]:
    """Variables by which pipelines find a server, instead of each starting its own."""
    folder = tmp_path_factory.mktemp("prefect")
    with mock.patch.object(sys, "executable", python), prefect_server(folder, **VARIABLES) as server:
        yield {name: server.environment[name] for name in ("PREFECT_API_URL", "PREFECT_HOME")}


@pytest.fixture(scope="module")
def python(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    folder = tmp_path_factory.mktemp("python")
    with held(os.environ, VARIABLES):
        for name in os.environ.keys() - VARIABLES.keys():
            del os.environ[name]
        with quick_python(folder, IMPORTED) as program:
            yield str(program)


def run(command: list[str], place: Path, **environment: str) -> str:
    """What a command prints."""
    done = subprocess.run(command, cwd=place, env=VARIABLES | environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def runs(python: str, place: Path, lines: str, files: str, **environment: str) -> None:
    """Run the commands: they print something or leave these files, and leave the recorded results as they are."""
    before = {path: path.stat().st_mtime_ns for path in RESULTS.iterdir()}
    shutil.rmtree(place / "out", ignore_errors=True)
    (place / "out").mkdir()
    said = ""
    for line in lines.split(" && "):
        name, *arguments = shlex.split(line)
        said += run([python, "-m", f"benchmarks.{name}", *arguments], place, **environment)
    assert said or files
    for pattern in files.split():
        found = [path.stat().st_size for path in place.glob(pattern)]
        assert found and all(found), pattern
    assert {path: path.stat().st_mtime_ns for path in RESULTS.iterdir()} == before


@pytest.mark.parametrize(
    ("lines", "files"), [pytest.param(*it, id=it[0], marks=[pytest.mark.e2e] * it[0].startswith(LONG)) for it in RUNS]
)
def test_a_benchmark_runs_from_its_command_to_its_results(python: str, place: Path, lines: str, files: str) -> None:
    needs(*NEEDS.get(lines.split()[0], ()))
    runs(python, place, lines, files)


@pytest.mark.e2e
@pytest.mark.parametrize(("lines", "files"), [pytest.param(*each, id=each[0]) for each in PIPELINES])
def test_a_benchmark_runs_its_pipelines_to_the_end(
    python: str, place: Path, prefect: dict[str, str], lines: str, files: str
) -> None:
    runs(python, place, lines, files, **prefect)
