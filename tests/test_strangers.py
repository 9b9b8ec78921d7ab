"""What a policy or a stranger writes is data to libraries: nothing of it runs (docs/explanation/security.md)."""

from __future__ import annotations

import ast
import asyncio
import json
import pickle
import re
import socket
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import datasets
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from transformers import AutoTokenizer
from websockets.asyncio.server import ServerConnection, serve
from websockets.http11 import Request, Response

from grpo_core.config.inputs import ModelConfig
from grpo_core.data.chat import encode_prompts
from grpo_core.data.prompts import load_tokenizer
from grpo_core.environments.adapters.open_env import OpenEnv
from grpo_core.errors import ConfigError
from grpo_core.planning.frameworks.launches import read_yaml
from grpo_core.rewards.builtin.maths.reward import math_answer
from grpo_core.rewards.builtin.maths.worker import compare
from grpo_core.rewards.builtin.structured import schema_problem
from tasks.data.own_schema import read_schema
from tasks.data.sources import Source, SourceError, load_source
from tests.rows import whole

ROOT = Path(__file__).parents[1]


@pytest.fixture
def marker(tmp_path: Path) -> Iterator[Path]:
    """A file that hostile texts make if they are run."""
    yield tmp_path / "ran"
    assert not (tmp_path / "ran").exists()


def code(marker: Path) -> str:
    return f"__import__('os').system('touch {marker}')"


class Pickled:
    def __init__(self, marker: Path) -> None:
        self.marker = marker

    def __reduce__(self) -> tuple[Any, ...]:
        return Path.touch, (self.marker,)


@pytest.mark.slow
def test_math_answer_takes_completion_and_answer_as_text(marker: Path) -> None:
    hostile = code(marker)
    forms = [hostile, f"\\boxed{{{hostile}}}", f"${hostile}$", f"#### {hostile}", f"\\boxed{{1+{hostile}}}", "9**9**9"]
    assert math_answer(forms, ["5"] * len(forms)) == [0.0] * len(forms)
    math_answer(["5"] * len(forms), forms)


@pytest.mark.slow
def test_sympy_evaluates_only_digits_and_operators_of_a_completion(
    marker: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from sympy.parsing import sympy_parser  # takes seconds

    evaluated: list[str] = []
    read = sympy_parser.stringify_expr  # the first that parse_expr and sympify do with a text

    def reading(text: str, *rest: Any) -> str:
        evaluated.append(text)
        return read(text, *rest)

    monkeypatch.setattr(sympy_parser, "stringify_expr", reading)
    forms = ["HERE", "$HERE$", "#### HERE", "1234 + HERE", "the answer is 4321 + HERE", "(7531).HERE", "8765 ** HERE"]
    boxed = ["HERE", "1+HERE", r"\text{HERE}", r"\operatorname{HERE}(1)", "x_{HERE}", r"\frac{HERE}{2}"]
    for form in [*forms, *(f"\\boxed{{{form}}}" for form in boxed)]:
        text = form.replace("HERE", code(marker))
        compare(text, "5")
        compare("5", text)
    assert len(evaluated) > 2 and [it for it in evaluated if not re.fullmatch(r"[\d\s.,+*/^()%-]*", it)] == []


def test_a_schema_of_a_completion_fetches_nothing(marker: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        server.setblocking(False)
        url = f"http://127.0.0.1:{server.getsockname()[1]}/schema"
        assert "leads nowhere" in schema_problem(json.dumps({"$ref": url}))
        assert schema_problem(json.dumps({"$schema": url, "type": "object"})) is not None
        with pytest.raises(BlockingIOError):
            server.accept()


@pytest.mark.slow
def test_games_of_textarena_take_moves_as_text(marker: Path) -> None:
    """Those that begin here: others ask for data or a key. Of these too, no file calls eval or exec."""
    import textarena  # takes seconds
    from textarena.envs.registration import ENV_REGISTRY

    played = 0
    for name in sorted(ENV_REGISTRY):
        if not name.endswith("-v0-raw"):
            continue
        for players in (1, 2):
            try:
                game = textarena.make(name)
                game.reset(num_players=players, seed=1)
            except (Exception, SystemExit):
                continue
            played += 1
            for move in (code(marker), f"[{code(marker)}]", f"[0 {code(marker)}]"):
                try:
                    if game.step(move)[0]:
                        break
                except Exception:
                    break
    assert played > 30
    files = [*Path(textarena.__file__).parent.rglob("*.py")]
    assert len(files) > 100 and {name for file in files for name in _running(file)} == set()


RUNNING = re.compile(
    r"(eval|exec|compile|__import__|parse_expr|sympify|pickle|subprocess|os\.(system|popen|exec\w*|spawn\w*))"
    r"|.*\.(parse_expr|sympify)|(pickle|subprocess)\..*"
)


def _running(file: Path) -> set[str]:
    """What a file calls or imports by name that may run a text."""
    try:
        tree = [*ast.walk(ast.parse(file.read_text()))]
    except SyntaxError:  # of a later Python: it cannot be imported either
        return set()
    names = {ast.unparse(node.func) for node in tree if isinstance(node, ast.Call)}
    for node in tree:
        if isinstance(node, ast.ImportFrom):
            names |= {f"{node.module}.{alias.name}" for alias in node.names}
        elif isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
    return {name for name in names if RUNNING.fullmatch(name)}


@pytest.mark.slow
def test_what_a_server_of_openenv_answers_is_text_or_an_error(marker: Path) -> None:
    answers: list[str | bytes] = [
        json.dumps({"type": "observation", "data": {"observation": code(marker), "reward": 0.5}}),
        json.dumps(
            {"type": "observation", "data": {"observation": {"__class__": code(marker)}, "reward": code(marker)}}
        ),
        json.dumps({"type": "error", "data": {"errors": code(marker)}}),
        pickle.dumps(Pickled(marker)),
        code(marker),
    ]

    async def answer(connection: ServerConnection) -> None:
        async for message in connection:
            kind = json.loads(message)["type"]
            await connection.send(answers[0] if kind == "reset" else answers[json.loads(message)["data"]["number"]])

    def schema(connection: ServerConnection, request: Request) -> Response | None:
        shape = {"action": {"properties": {code(marker): {"description": code(marker)}}}}
        return connection.respond(200, json.dumps(shape)) if request.path == "/schema" else None

    def play(port: int) -> None:
        environment = OpenEnv(f"http://127.0.0.1:{port}")
        assert environment.reset(seed=1) == "\n" + json.dumps(code(marker))
        assert environment._step({"number": 0}) == json.dumps(code(marker)) and environment.total == 0.5
        for number in range(1, len(answers)):
            with pytest.raises(ValueError):
                environment._step({"number": number})
        assert environment.connection
        environment.connection.close()

    async def main() -> None:
        async with serve(answer, "127.0.0.1", 0, process_request=schema) as server:
            await asyncio.to_thread(play, next(iter(server.sockets)).getsockname()[1])

    asyncio.run(main())


@pytest.mark.parametrize("kind", ["parquet", "folder"])
def test_a_data_set_s_own_types_are_not_unpickled(marker: Path, tmp_path: Path, kind: str) -> None:
    own = {
        "ARROW:extension:name": "arrow.py_extension_type",
        "ARROW:extension:metadata": pickle.dumps(Pickled(marker)),
    }
    table = pa.table({"prompt": ["1+1="]}, pa.schema([pa.field("prompt", pa.string(), metadata=own)]))
    if kind == "parquet":
        path = tmp_path / "rows.parquet"
        pq.write_table(table, path)
    else:
        path = tmp_path / "saved"
        datasets.DatasetDict({"train": datasets.Dataset.from_list([{"prompt": "1+1="}])}).save_to_disk(path)
        (data,) = (path / "train").glob("*.arrow")
        with pa.OSFile(str(data), "wb") as file, pa.ipc.new_stream(file, table.schema) as stream:
            stream.write_table(table)
    with pytest.raises(SourceError, match="cannot be read as .parquet" if kind == "parquet" else "split 'train'"):
        whole(load_source(Source("data.train", str(path))))


def test_a_chat_template_reaches_nothing_of_python(marker: Path, tmp_path: Path, model_folder: Path) -> None:
    tokenizer = AutoTokenizer.from_pretrained(model_folder)
    tokenizer.chat_template = f"{{{{ cycler.__init__.__globals__.os.system('touch {marker}') }}}}"
    tokenizer.save_pretrained(tmp_path / "model")
    with pytest.raises(Exception, match="unsafe"):
        encode_prompts(
            [[{"role": "user", "content": "x"}]], load_tokenizer(ModelConfig(name_or_path=str(tmp_path / "model")))
        )


def test_yaml_makes_no_objects(marker: Path, tmp_path: Path) -> None:
    text = f"schema_type: dataframe\ncolumns: !!python/object/apply:os.system ['touch {marker}']\n"
    (tmp_path / "schema.yaml").write_text(text)
    with pytest.raises(ConfigError, match="not a schema"):
        read_schema(tmp_path / "schema.yaml")
    with pytest.raises(Exception, match="could not determine a constructor"):
        read_yaml(text)


SHARDED = "grpo_core/distributed.py"  # its checkpoints have an index that is a pickle: the run's folder is trusted
UNPICKLING = {  # what the others read was sent by a process of this project
    SHARDED,
    "grpo_core/environments/worker.py",
    "grpo_core/rewards/isolated_worker.py",
    "grpo_core/system/sandbox/inside_verifier.py",
}
EVALUATING = {  # inside the sandbox; the annotation of one's own reward; an assertion of few kinds of nodes
    *(f"grpo_core/system/sandbox/{name}.py" for name in ("inside", "inside_session", "inside_verifier")),
    "grpo_core/rewards/contract.py",
    "grpo_core/rewards/builtin/code_tests.py",
}


@pytest.mark.slow
def test_no_file_unpickles_or_evaluates_what_others_wrote() -> None:
    found: dict[str, set[str]] = {"unpickles": set(), "evaluates": set()}
    for file in (path for room in ("grpo_core", "tasks", "flows") for path in (ROOT / room).rglob("*.py")):
        name = file.relative_to(ROOT).as_posix()
        for node in ast.walk(ast.parse(file.read_text())):
            if isinstance(node, (ast.Import, ast.ImportFrom)):
                home = getattr(node, "module", None)
                modules = {home, *(".".join(filter(None, (home, alias.name))) for alias in node.names)}
                sharded = set() if name == SHARDED else {"torch.distributed.checkpoint"}
                assert not modules & {"dill", "joblib", "cloudpickle", *sharded}, name
            if not isinstance(node, ast.Call):
                continue
            called, keywords = ast.unparse(node.func), {it.arg: ast.unparse(it.value) for it in node.keywords}
            if called == "torch.load":
                assert keywords.get("weights_only") == "True", f"{name}:{node.lineno}"
            if (
                called in ("np.load", "numpy.load", "pd.read_pickle", "yaml.load")
                and name != "grpo_core/planning/frameworks/launches.py"
            ):
                raise AssertionError(f"{name}:{node.lineno} calls {called}")
            if called in ("pickle.load", "pickle.loads", "pickle.Unpickler", "checkpoint.load"):
                found["unpickles"].add(name)
            if called in ("eval", "exec", "parse_expr", "sympify"):
                found["evaluates"].add(name)
    assert found == {"unpickles": UNPICKLING, "evaluates": EVALUATING}
