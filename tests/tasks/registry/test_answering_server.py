"""A version that its own code serves, where there is no vLLM, answers as evaluated, or says what it cannot do."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from mlflow import pyfunc

from flows.serving.model_server import as_evaluated
from grpo_core.data.chat import without_gaps
from grpo_core.system.tables import read_parquet
from tasks.registry.answering_server import CHAT, COMPLETIONS, answer
from tests.tasks.registry.evaluated import evaluated_run, make_version, served_version

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module", params=[False, True], ids=["texts", "conversations"])
def run(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    run = evaluated_run(tmp_path_factory.mktemp("evaluated"), conversational=request.param)
    make_version(run, run / "versions" / "1")
    return run


def question(prompt: Any) -> dict[str, Any]:
    """What a user asks, who leaves the system prompt to the server."""
    asked = {"prompt": prompt} if isinstance(prompt, str) else {"messages": without_gaps(prompt)[1:]}
    return {"model": "sums", **asked}


def test_what_the_proxy_fills_in_is_answered_as_evaluated(run: Path) -> None:
    model: Any = pyfunc.load_model(str(run / "versions" / "1")).unwrap_python_model()
    version = served_version(run, run / "versions" / "1")
    for row in read_parquet(run / "evaluation" / "samples.parquet").iter_rows(named=True):
        path = COMPLETIONS if isinstance(row["prompt"], str) else CHAT
        found = answer(model, path, as_evaluated(version, question(row["prompt"])))
        [choice] = found["choices"]
        assert (choice["text"] if path == COMPLETIONS else choice["message"]["content"]) == row["trained/completion"]
        assert found["usage"]["completion_tokens"] == row["trained/completion_tokens"]
        assert (choice["finish_reason"] == "length") == row["trained/truncated"]
    asked = as_evaluated(version, {**question(row["prompt"]), "max_completion_tokens": 1, "stop": "9", "n": 1})
    assert answer(model, path, asked)["usage"]["completion_tokens"] == 1
    for wrong, said in (
        ({"stream": True}, "stream = True needs vLLM"),
        ({"seed": 3}, "seed = 3 needs vLLM"),
        ({"max_tokens": 60}, "the model takes 64"),
    ):
        with pytest.raises(Exception, match=said):
            answer(model, path, {**as_evaluated(version, question(row["prompt"])), **wrong})
    with pytest.raises(ValueError, match=f"{'prompt' if path == COMPLETIONS else 'messages'}: missing"):
        answer(model, path, as_evaluated(version, {}))
    if path == COMPLETIONS:
        with pytest.raises(ValueError, match="prompt: give one text"):
            answer(model, path, as_evaluated(version, {"prompt": ["1+1=", "1+2="]}))
    other = {"messages": [{"role": "user", "content": "1"}]} if path == COMPLETIONS else {"prompt": "1"}
    with pytest.raises(ValueError, match=f"ask it at {path}$"):
        answer(model, CHAT if path == COMPLETIONS else COMPLETIONS, as_evaluated(version, other))
