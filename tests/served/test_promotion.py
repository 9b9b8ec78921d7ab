"""Promotion and rollback as a person meets them: how flow runs end, what they show, what the commands answer."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from flows.cli.main import app
from tasks.rendering.markdown import escape
from tasks.stages.errors import Interrupted
from tests.evaluations import fixed_samples, register_version


def _register(model: str, right: int) -> str:
    return register_version(model, fixed_samples({"base": [0] * 10, "trained": [1] * right + [0] * (10 - right)}))


def _artifact(key: str) -> Any:
    from prefect.artifacts import Artifact

    return Artifact.get(key)


@pytest.mark.slow
def test_a_refusal_is_the_named_answer_of_a_completed_flow_run(storage: Path) -> None:
    from flows.promotion import promote, rollback
    from tasks.registry.champion import PromotionError

    _register("flows", 7)
    promoted = promote("flows", return_state=True)
    assert (promoted.is_completed(), promoted.name) == (True, "Promoted")
    _register("flows", 8)
    refused = promote("flows", return_state=True)
    assert (refused.is_completed(), refused.name) == (True, "Refused")
    assert "not shown to be better" in refused.message
    shown = _artifact("promotion")
    assert shown.description == escape("flows version 2: refused")
    cells = ["held-out accuracy", "80.0%", "70.0%", "+10.0 points ["]
    assert f"| {' | '.join(map(escape, cells))}" in shown.data
    assert f"| {escape('broken: better')}" in shown.data
    forced = promote("flows", force=True)
    assert (forced.decision, forced.version) == ("forced", "2")
    assert rollback("flows") == "flows version 1 is champion again, version 2 is not"
    with pytest.raises(PromotionError, match="has no champion before version 1"):
        rollback("flows")


@pytest.mark.slow
def test_the_commands_exit_by_what_became_of_it(storage: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from prefect.settings import PREFECT_API_URL

    monkeypatch.setenv("PREFECT_API_URL", PREFECT_API_URL.value())

    def grpo(*arguments: str) -> tuple[int, str]:
        result = CliRunner().invoke(app, arguments)
        return result.exit_code, " ".join(result.output.split())

    _register("commands", 5)
    for arguments, expected, answer in [
        ((), 1, "commands version 1: refused: accuracy on held-out 50.0% against 0.0% of the base model"),
        (("--set", "promotion.confidence=0.8"), 0, "commands version 1: promoted: accuracy on held-out 50.0%"),
        (("--version", "1"), 0, "commands version 1: unchanged: version 1 is the champion already"),
        (("--version", "9"), 2, "commands has no version 9"),
        (("--version", "1", "--set", "confidence"), 2, "is not of the form section.key=value"),
    ]:
        code, said = grpo("promote", "commands", *arguments)
        assert (code, answer in said) == (expected, True), said
    code, said = grpo("promote", "command")
    assert code == 2
    assert "no registered model 'command' in MLflow; the nearest there: commands" in said
    run = storage / "runs" / "their-run"
    run.mkdir(parents=True)
    (run / "registration.json").write_text('{"model_name": "commands", "version": "1"}')
    code, said = grpo("promote", "their-run")
    assert (code, "commands version 1: unchanged" in said) == (0, True), said
    code, said = grpo("rollback", "commands")
    assert code == 2
    assert "commands has no champion before version 1" in said
    _register("commands", 5)
    assert grpo("promote", "commands", "--force")[0] == 0
    code, said = grpo("rollback", "commands")
    assert code == 0
    assert "commands version 1 is champion again, version 2 is not" in said


@pytest.mark.slow
def test_a_flow_s_result_reaches_its_caller_though_the_answers_to_its_states_are_lost(
    storage: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from prefect import flow
    from prefect.client.orchestration import SyncPrefectClient
    from prefect.states import Completed

    from tasks.stages.endings import end_in_plain_words

    @flow
    @end_in_plain_words
    def lost(interrupted: bool) -> Any:
        if interrupted:
            raise Interrupted("train was interrupted", KeyboardInterrupt())
        return Completed(message="verdict", data=storage)

    asked, request = [], SyncPrefectClient.request

    def request_again(client: SyncPrefectClient, method: Any, path: Any, *args: Any, **options: Any) -> Any:
        """As Prefect's client does if it gets no answer."""
        if path.endswith("/set_state"):
            asked.append(request(client, method, path, *args, **options).json()["status"])
        return request(client, method, path, *args, **options)

    monkeypatch.setattr(SyncPrefectClient, "request", request_again)
    assert lost(False) == storage
    with pytest.raises(Interrupted, match="train was interrupted"):
        lost(True)
    assert asked == ["ACCEPT"] * 4, "two flow runs began and ended"


@pytest.mark.slow
def test_a_gpu_limit_that_another_command_makes_meanwhile_is_kept(
    storage: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from prefect.client.orchestration import SyncPrefectClient, get_client
    from prefect.exceptions import ObjectNotFound

    from flows.serving.server_setup import ensure_gpu_limit
    from tasks.processes.gpus.slots import GPU_LIMIT

    def unseen(*_: Any) -> None:
        raise ObjectNotFound(LookupError(GPU_LIMIT))

    with get_client(sync_client=True) as client:
        ensure_gpu_limit()
        kept = client.read_global_concurrency_limit_by_name(GPU_LIMIT)
        with monkeypatch.context() as patch:
            patch.setattr(SyncPrefectClient, "read_global_concurrency_limit_by_name", unseen)
            ensure_gpu_limit()
        assert client.read_global_concurrency_limit_by_name(GPU_LIMIT) == kept
