"""`make gpu-check` without a GPU: each part runs, cut down; the fault that each is for makes it fail."""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from benchmarks import gpu_check
from benchmarks.gpu import decoding, engines, kernels, measured, trainings
from benchmarks.gpu.report import Row
from benchmarks.gpu_check import GROUPS, Part
from grpo_core.model import logprobs, packed_attention
from grpo_core.model.policy import Policy
from grpo_core.rollout import transformers_engine
from grpo_core.rollout.group_cache import GroupCache
from grpo_core.training import optimizer
from tests.plain_kernels import plain_varlen
from tests.pretend_gpu import pretend_gpu

pytestmark = pytest.mark.served

Work = Callable[[Path, Callable[[Row], None]], None]


def failed(work: Work, scratch: Path) -> list[str]:
    """Names of the rows that do not pass."""
    scratch.mkdir(exist_ok=True)
    rows: list[Row] = []
    work(scratch, rows.append)
    assert rows
    return [row.what for row in rows if row.passed is False]


# ------------------------------------------------------------------------------------------------------- the driver


def checked(monkeypatch: pytest.MonkeyPatch, output: Path, groups: list[list[Part]], *options: str) -> dict[str, Any]:
    monkeypatch.setattr(gpu_check, "GROUPS", groups)
    monkeypatch.setattr(sys, "argv", ["gpu_check", "--output", str(output), *options])
    gpu_check.main()
    return {result["part"]: result for result in json.loads(output.read_text())["parts"]}


def test_a_part_that_hangs_is_ended_and_said_to_have_failed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    output = tmp_path / "found.json"
    with pytest.raises(SystemExit, match=f"failed: hardware. Please send {output} back"):
        checked(monkeypatch, output, [[Part("hardware", "hardware:hardware", limit=0.05)]])
    [result] = json.loads(output.read_text())["parts"]
    assert result["passed"] is False
    assert "stopped after 0 s" in result["output"]
    assert "stopped after 0 s" in capsys.readouterr().out


def test_what_no_time_or_no_package_is_there_for_is_listed_and_fails_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    parts = [Part("late", "hardware:hardware", 60, least=50), Part("bare", "hardware:hardware", 60, 1, ("no_such",))]
    found = checked(monkeypatch, tmp_path / "found.json", [parts], "--budget", "30")
    assert {name: result["passed"] for name, result in found.items()} == {"late": None, "bare": None}
    assert found["late"]["output"].startswith("not started")
    assert found["bare"]["output"] == "needs no_such"


@pytest.mark.e2e
def test_parts_of_a_group_run_side_by_side_and_results_are_written_as_they_end(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(gpu_check, "ON_GPU", True)
    path = tmp_path / "found.json"
    group = [Part("slow", "engines:nothing_like_it", 60, 1), Part("quick", "hardware:hardware", 60, 1)]
    seen: list[list[str]] = []
    write = gpu_check.write
    monkeypatch.setattr(gpu_check, "write", lambda results, to: (write(results, to), seen.append(
        [result["part"] for result in json.loads(to.read_text())["parts"]]))[0])  # fmt: skip
    starts: list[float] = []
    running = gpu_check._Running
    monkeypatch.setattr(gpu_check, "_Running", lambda *a: (starts.append(time.monotonic()), running(*a))[1])
    with pytest.raises(SystemExit, match="failed: slow"):
        checked(monkeypatch, path, [group])
    assert [len(names) for names in seen] == [1, 2]
    assert starts[1] - starts[0] < 1


def test_every_part_names_a_function_and_every_module_of_parts_is_a_part_s() -> None:
    for part in (part for group in GROUPS for part in group):
        module, _, function = part.work.partition(":")
        assert callable(getattr(__import__(f"benchmarks.gpu.{module}", fromlist=[module]), function)), part


def test_a_row_says_what_was_found_what_was_demanded_and_whether_it_passed() -> None:
    rows = [{"what": "drift", "found": "0.2", "demanded": "at most 0.1", "passed": False}]
    result = {"part": "engine", "passed": False, "seconds": 3, "rows": rows, "output": "Traceback\nValueError: wrong"}
    text = gpu_check.table(result)
    assert [
        word for word in ("engine", "drift", "at most 0.1", "FAILED", "ValueError: wrong") if word not in text
    ] == []


# ------------------------------------------------------------------------------------------- kernels, and their faults


def varlen(monkeypatch: pytest.MonkeyPatch, **changes: Any) -> None:
    """Flash attention's kernel in plain torch, as this machine's processor can compute it."""
    monkeypatch.setattr(kernels, "ON_GPU", True)
    monkeypatch.setattr(kernels, "HEADS", kernels.HEADS[:1])

    def attend(*arguments: Any, **options: Any) -> Any:
        return plain_varlen(*arguments, **{"enable_gqa": True, **options, **changes})

    monkeypatch.setattr(packed_attention, "varlen_attn", attend)


def shifted(own: Callable[..., Any]) -> Callable[..., Any]:
    """A completion's keys begin with the second token of its prompt."""

    def pack(*arguments: Any) -> Any:
        found = own(*arguments)
        return replace(found, keys=(found.keys + 1).clamp(max=int(found.keys.max())))

    return pack


def test_attention_passes_and_fails_with_another_token_s_keys(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    varlen(monkeypatch)
    assert failed(kernels.attention, tmp_path) == []
    monkeypatch.setattr(packed_attention, "_varlen", shifted(packed_attention._varlen))
    assert len(failed(kernels.attention, tmp_path)) == 4


def test_the_head_passes_and_fails_with_logits_in_bfloat16(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert failed(kernels.head, tmp_path) == []
    own = logprobs.float32_product
    monkeypatch.setattr(logprobs, "float32_product", lambda *a: own(*a).bfloat16().float())
    assert "head, 64 × 1000: log-probabilities" in failed(kernels.head, tmp_path)


def test_copies_pass_and_fail_where_a_buffer_is_used_too_early(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert failed(kernels.copies, tmp_path) == []
    own = kernels.move
    monkeypatch.setattr(kernels, "move", lambda tensors, device: [own(tensors, device)[0]] * len(tensors))
    assert failed(kernels.copies, tmp_path) == ["copies by pinned memory"]


def test_policies_pass_and_fail_where_completions_see_each_other(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert failed(kernels.policies, tmp_path / "right") == []
    own = packed_attention._padded

    def mixed(*arguments: Any) -> Any:
        found = own(*arguments)
        return replace(
            found, completions=tuple(replace(it, prompt_of=it.prompt_of.flip(0)) for it in found.completions)
        )

    monkeypatch.setattr(packed_attention, "_padded", mixed)
    # The policy's own probe notices, and goes another way.
    assert "no, all weights: packed for" in failed(kernels.policies, tmp_path / "wrong")


def test_waits_fail_above_the_bound(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from grpo_core.training import loop

    own = loop.update

    def waiting(*arguments: Any) -> Any:
        import warnings

        for _ in range(kernels.MOST_WAITS + 1):
            warnings.warn("called a synchronizing CUDA operation", stacklevel=1)
        return own(*arguments)

    monkeypatch.setattr(torch.cuda, "set_sync_debug_mode", lambda mode: None)
    monkeypatch.setattr(kernels, "PRECISION", "no")
    monkeypatch.setattr(kernels, "ON_GPU", True)
    assert failed(kernels.waits, tmp_path / "right") == []
    monkeypatch.setattr(loop, "update", waiting)
    assert failed(kernels.waits, tmp_path / "wrong") == ["waits per update"]


@pytest.mark.parametrize("fault", ["old places", "other rows"])
def test_decoding_passes_and_fails_with_a_stale_cache(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, fault: str
) -> None:
    monkeypatch.setattr(decoding, "STEPS", 20)
    monkeypatch.setattr(decoding, "JOINS", {5: 3})
    monkeypatch.setattr(decoding, "LEAVES", (9, 11, 13))
    monkeypatch.setattr(decoding, "BOUNDS", {torch.float32: 1e-3})
    assert failed(decoding.decoding, tmp_path) == []
    if fault == "old places":
        own = GroupCache.decode

        def decode(cache: Any, token: Any) -> Any:
            cache.positions -= int(cache.step > 3)
            return own(cache, token)

        monkeypatch.setattr(GroupCache, "decode", decode)
    else:
        keep = GroupCache.keep
        monkeypatch.setattr(GroupCache, "keep", lambda cache, rows: keep(cache, rows.flip(0)))
    assert failed(decoding.decoding, tmp_path) == ["torch.float32: logits of 20 steps from plain passes"]


@pytest.fixture
def pretended(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    for module in (decoding, kernels):
        monkeypatch.setattr(module, "ON_GPU", True)
        monkeypatch.setattr(module, "DEVICE", "cuda")
    with pretend_gpu():
        yield


def test_decoding_fails_where_no_step_is_captured(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, pretended: None
) -> None:
    monkeypatch.setattr(decoding, "STEPS", 20)
    monkeypatch.setattr(decoding, "BOUNDS", {torch.float32: 1e-3})
    assert failed(decoding.decoding, tmp_path) == []
    monkeypatch.setattr(decoding, "GroupCache", lambda *given, captures: GroupCache(*given))
    assert failed(decoding.decoding, tmp_path) == ["torch.float32: steps by a captured graph"]


def test_fall_backs_fail_where_a_family_is_not_captured_or_keeps_prompts_twice(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, pretended: None
) -> None:
    stream = torch.cuda.current_stream()
    for name in ("default_stream", "current_stream"):
        monkeypatch.setattr(torch.cuda, name, lambda *_: stream)
    monkeypatch.setattr(torch.cuda, "memory_reserved", lambda: 0)
    unpretended = ["Qwen3Moe: engine"]  # a CPU has no histogram of integers
    assert failed(decoding.fall_backs, tmp_path) == unpretended
    with monkeypatch.context() as planted:
        planted.setattr(transformers_engine, "why_not_captured", lambda _: "planted")
        missed = [f"{name}: captured" for name in ("Qwen2", "Llama", "Qwen3")]
        assert failed(decoding.fall_backs, tmp_path) == missed + unpretended
    monkeypatch.setattr(transformers_engine, "why_not_shared", lambda *_, **__: "planted")
    assert "Qwen2: prompts' cache is shared" in failed(decoding.fall_backs, tmp_path)


@pytest.mark.e2e
def test_stop_texts_fail_where_the_host_waits_for_each_row(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, pretended: None
) -> None:
    monkeypatch.setattr(decoding, "STOPPED", (4, 2, 64))
    assert failed(decoding.stop_texts, tmp_path) == []
    own = transformers_engine.advance

    def waiting(rows: Any, *given: Any) -> Any:
        for row in rows.going:
            bool(row)
        return own(rows, *given)

    monkeypatch.setattr(transformers_engine, "advance", waiting)
    assert failed(decoding.stop_texts, tmp_path) == ["waits per token step with stop texts"]


# ------------------------------------------------------------------------------------- what is measured, and its faults


@pytest.mark.e2e
def test_compiled_passes_and_fails_where_layers_run_uncompiled(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch, "compile", partial(torch.compile, backend="eager"))
    for limit, found in ((8, []), (1, ["layers that run uncompiled"])):
        torch._dynamo.reset()
        with torch._dynamo.config.patch(recompile_limit=limit):
            assert failed(measured.compiled, tmp_path / f"limit-{limit}") == found


@pytest.fixture
def measuring(monkeypatch: pytest.MonkeyPatch, pretended: None) -> None:
    """Whose memory and speed are what they should be."""
    monkeypatch.setattr(measured, "ON_GPU", True)
    monkeypatch.setattr(measured, "PRECISION", "bf16")
    monkeypatch.setattr(measured, "product_flops", lambda: 1e12)
    monkeypatch.setattr(measured, "forecast_gib", lambda *_: 1.0)
    monkeypatch.setattr(torch.cuda, "max_memory_allocated", lambda: measured.GIB)
    monkeypatch.setattr(torch.cuda, "max_memory_reserved", lambda: measured.GIB)


def runs_out(monkeypatch: pytest.MonkeyPatch, times: int) -> None:
    """The memory runs out in the first passes of a training."""
    own, left = Policy.__call__, [None] * times

    def full(policy: Policy, *arguments: Any, **options: Any) -> Any:
        if left and torch.is_grad_enabled():
            left.pop()
            raise torch.OutOfMemoryError("planted")
        return own(policy, *arguments, **options)

    monkeypatch.setattr(Policy, "__call__", full)


@pytest.mark.e2e
def test_memory_that_should_run_out_and_does_not_fails_and_so_does_what_should_not(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, measuring: None
) -> None:
    row = ["tokens per pass after memory ran out"]
    assert failed(measured.long_context, tmp_path / "fits") == []
    assert failed(measured.out_of_memory, tmp_path / "fits, wrongly") == row
    with monkeypatch.context() as once:
        runs_out(once, 1)
        assert failed(measured.out_of_memory, tmp_path / "runs out") == []
    runs_out(monkeypatch, 1)
    assert failed(measured.long_context, tmp_path / "runs out, wrongly") == row


def test_offloaded_fails_where_the_moments_stay_on_the_device(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, measuring: None
) -> None:
    assert failed(measured.offloaded, tmp_path / "right") == []
    monkeypatch.setattr(optimizer, "_to_host", lambda value, _: value)
    assert failed(measured.offloaded, tmp_path / "wrong") == ["where the moments rest"]


def test_a_peak_beside_the_forecast_fails_outside_of_its_bounds(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "max_memory_allocated", lambda: 46 * measured.GIB)
    monkeypatch.setattr(torch.cuda, "max_memory_reserved", lambda: 47 * measured.GIB)
    for told, passed in ((46.0, True), (50.0, True), (52.0, False), (41.0, False), (130.0, False)):
        rows: list[Row] = []
        measured.beside_forecast(rows.append, told)
        assert rows[-1].passed is passed


# ------------------------------------------------------------------------------------- vLLM: what is made of its output


def trained(said: str, drift: float, status: int = 0) -> Callable[..., trainings.Done]:
    """A training with vLLM that says this."""

    def train(run: Path, *_: Any) -> trainings.Done:
        (run / "said").write_text(said)
        (run / "training").mkdir(exist_ok=True)
        (run / "training" / "metrics.jsonl").write_text(json.dumps({"sampling/sync_drift": drift}) + "\n")
        return trainings.Done(status, said, 1.0)

    return train


@pytest.mark.parametrize(
    ("said", "drift", "status", "rows"),
    [
        ("weights reach the engine: adapter", 1e-6, 0, []),
        ("weights reach the engine: adapter", 1e-6, 1, ["status"]),
        ("weights reach the engine: shared", 1e-6, 0, ["hand-over"]),
        ("", 1e-6, 0, ["hand-over"]),
        ("weights reach the engine: adapter", 0.5, 0, ["probe, the largest of the updates"]),
        ("weights reach the engine: adapter", float("nan"), 0, ["probe, the largest of the updates"]),
    ],
)
def test_an_adapter_fails_that_is_handed_over_otherwise_or_wrongly(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, said: str, drift: float, status: int, rows: list[str]
) -> None:
    monkeypatch.setattr(engines, "train", trained(said, drift, status))
    assert failed(engines.adapter, tmp_path) == rows


@pytest.mark.parametrize(
    ("said", "status", "passes"),
    [
        ("training failed: vLLM needs more memory; raise rollout.gpu_memory_utilization", 1, True),
        ("Traceback (most recent call last):\nValueError: raise gpu_memory_utilization", 1, False),
        ("ValueError: no available memory for the cache blocks", 1, False),
        ("", -9, False),
    ],
)
def test_too_little_memory_fails_without_a_sentence(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, said: str, status: int, passes: bool
) -> None:
    monkeypatch.setattr(engines, "train", trained(said, 0.0, status))
    assert (failed(engines.too_little_memory, tmp_path) == []) is passes
