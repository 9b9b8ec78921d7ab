"""Each benchmark that a page quotes runs, cut down, from its command line to its results."""

from __future__ import annotations

import hashlib
import json
import os
import re
import runpy
import shlex
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path
from unittest import mock

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from benchmarks.command import RESULTS, ROOT, python_path
from tests.quick_python import quick_python
from tests.serving import prefect_server

OUT = "--tiny --output out"
# The commands of each test, and the files that they leave in `out`.
RUNS: list[tuple[str, str]] = [
    ("vs_trl --only tiny half-silent memory threshold " + OUT, "*.json *.png"),
    ("vs_trl --gpu " + OUT, "*.json *.png"),
    ("parity_trl --only gspo --output out/parity.json", "parity.json"),
    ("ablation --rounds 1 --tiny", ""),
    ("adapter_handover --rounds 1", ""),
    ("answers --completions 8 --tokens 8 --rounds 1", ""),
    ("checkpoints . --rounds 1 --tiny", ""),
    ("conversations --conversations 2 --rounds 1", ""),
    ("correction --samples 4 --rounds 1 " + OUT, "correction.json"),
    ("curriculum half --seeds 1 " + OUT, "curriculum.json curriculum.png"),
    ("decisions --trials 1 --output out/decisions.md", "decisions.md"),
    ("engine_gap --tiny", ""),
    ("four_bit --updates 1", ""),
    ("isolated --batches 1", ""),
    ("lost_weights copy --tiny", ""),
    ("recipes ms-swift=clone/.git --output out/recipes.md", "recipes.md"),
    ("records " + OUT, "records.json"),
    ("sandbox --programs 2", ""),
    ("sharded_memory --models 7B --gpus 8 --tiny", ""),
    ("sharding --turns 1 --rounds 1 --tiny", ""),
    ("staleness --simulate " + OUT, "staleness-simulated.json staleness-simulated.png"),
    ("staleness --real --ahead 0 1 --updates 1 --judge-seconds 0 " + OUT, "staleness-real.json"),
    (
        "staleness --learn quickstart --ahead 0 1 --updates 1 --seeds 1 " + OUT,
        "staleness-learning.json staleness-learning.png",
    ),
    ("tracking --tiny", ""),
]
PIPELINES = [
    ("large_data --rows 64 --output out/large.json", "large.json"),
    ("reward_models --tiny && recipe_curves --record", ""),
]
ELSEWHERE = {"gpu_check"}  # test_gpu_check.py
SKIPPED = {
    "sandbox --programs 2": pytest.mark.skipif(
        not shutil.which("bwrap"), reason="Debian's package bubblewrap is missing"
    )
}
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
)  # not Prefect, which reads its settings when it is imported
DIALOGUE = """
from pathlib import Path
from examples.dialogue import make
make.TRAIN_ROWS, make.EVAL_ROWS, make.STEPS, make.REWARD_STEPS, make.WEAK_STEPS = 64, 16, 1, 1, 1
(folder := Path("storage", "examples", "dialogue")).mkdir(parents=True)
make.make(folder)
"""
# As outside of pytest, except that nothing is compiled.
VARIABLES = {name: value for name, value in os.environ.items() if not name.startswith(("PYTEST", "GRPO_STORAGE"))}
VARIABLES |= {"PYTHONPATH": python_path(ROOT), "TORCH_COMPILE_DISABLE": "1"}
RECIPE = "swift rlhf --rlhf_type grpo --model Qwen/Qwen2.5-0.5B --per_device_train_batch_size 4 --num_generations 4\n"


def quoted() -> set[str]:
    """Benchmarks that a page names, or runs by `make`."""
    listed = subprocess.run(
        ["git", "ls-files", "*.md", "Makefile"], cwd=ROOT, capture_output=True, text=True, check=True
    )
    text = "\n".join((ROOT / name).read_text() for name in listed.stdout.split())
    named = {*re.findall(r"\bbenchmarks[./](\w+)", text), *re.findall(r"^\| `(\w+)", text, re.MULTILINE)}
    return named & {path.stem for path in (ROOT / "benchmarks").glob("*.py")}


def test_every_benchmark_that_a_page_quotes_has_a_cut_down_run() -> None:
    assert len(quoted()) > 20
    assert quoted() - {line.split()[0] for lines, _ in [*RUNS, *PIPELINES] for line in lines.split(" && ")} == ELSEWHERE


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder like the project's, whose examples are made already: their models are not taught."""
    place = tmp_path_factory.mktemp("place")
    (place / "configs").symlink_to(ROOT / "configs")
    (place / "docs" / "images").mkdir(parents=True)
    (place / "benchmarks" / "results").mkdir(parents=True)
    shutil.copy(RESULTS / "recipe-curves.json", place / "benchmarks" / "results")
    script = ROOT / "examples" / "arithmetic" / "make.py"
    make, sums = runpy.run_path(str(script)), place / "storage" / "examples" / "arithmetic"
    sums.mkdir(parents=True)
    for name, rows, count in zip(("train", "eval"), make["make_rows"](), (256, 16), strict=True):
        pq.write_table(pa.Table.from_pylist(rows[:count]), sums / f"{name}.parquet")
    tokenizer = make["make_tokenizer"]()
    make["make_model"](tokenizer).save_pretrained(sums / "base")
    tokenizer.save_pretrained(sums / "base")
    (sums / "info.json").write_text(json.dumps({"source": hashlib.sha256(script.read_bytes()).hexdigest()}))
    (place / "clone" / "examples").mkdir(parents=True)
    (place / "clone" / "examples" / "grpo.sh").write_text(RECIPE)
    git = ["git", "-C", str(place / "clone"), "-c", "user.name=us", "-c", "user.email=us@example.com"]
    for command in (["init", "--quiet"], ["add", "."], ["commit", "--quiet", "--message", "One recipe"]):
        subprocess.run([*git, *command], check=True)
    return place


@pytest.fixture(scope="module")
def prefect(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, str]]:
    """Variables by which pipelines find a server, instead of each starting its own."""
    with prefect_server(tmp_path_factory.mktemp("prefect")) as server:
        yield {name: server.environment[name] for name in ("PREFECT_API_URL", "PREFECT_HOME")}


@pytest.fixture(scope="module")
def dialogue(python: str, place: Path) -> None:
    """The inputs of the dialogue recipe."""
    run([python, "-c", DIALOGUE], place)


@pytest.fixture(scope="module")
def python(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    folder = tmp_path_factory.mktemp("python")
    with mock.patch.dict(os.environ, VARIABLES, clear=True), quick_python(folder, IMPORTED) as program:
        yield str(program)


def run(command: list[str], place: Path, **environment: str) -> str:
    """What a command prints."""
    done = subprocess.run(command, cwd=place, env=VARIABLES | environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def runs(python: str, place: Path, lines: str, files: str, **environment: str) -> None:
    """Run the commands; they leave these files in `out`, and the recorded results as they are."""
    before = {path: path.stat().st_mtime_ns for path in RESULTS.iterdir()}
    shutil.rmtree(place / "out", ignore_errors=True)
    (place / "out").mkdir()
    for line in lines.split(" && "):
        name, *arguments = shlex.split(line)
        run([python, "-m", f"benchmarks.{name}", *arguments], place, **environment)
    found, expected = sorted((place / "out").iterdir()), files.split()
    assert [path.name for path in found if not path.stat().st_size] == []
    assert len(found) == len(expected) and all(map(Path.match, found, expected)), found
    assert {path: path.stat().st_mtime_ns for path in RESULTS.iterdir()} == before


@pytest.mark.slow
@pytest.mark.parametrize(
    ("lines", "files"),
    [pytest.param(*each, marks=SKIPPED.get(each[0], ())) for each in RUNS],
    ids=[it for it, _ in RUNS],
)
def test_a_benchmark_runs_from_its_command_to_its_results(python: str, place: Path, lines: str, files: str) -> None:
    runs(python, place, lines, files)


@pytest.mark.slow
@pytest.mark.usefixtures("dialogue")
@pytest.mark.parametrize(("lines", "files"), PIPELINES)
def test_a_benchmark_runs_its_pipelines_to_the_end(
    python: str, place: Path, prefect: dict[str, str], lines: str, files: str
) -> None:
    runs(python, place, lines, files, **prefect)
