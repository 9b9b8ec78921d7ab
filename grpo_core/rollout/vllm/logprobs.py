"""vLLM's log-probabilities of what it samples, over the whole vocabulary where min-p, top-k and top-p truncate it.

vLLM 0.32 offers those before the temperature ("raw_logprobs") and those after truncation ("processed_logprobs"). The
trainer's are at the temperature and over the whole vocabulary, so the sampler is wrapped between the two. A repetition
penalty is applied before, so the log-probabilities include it.

The logits are float32, as the trainer's: vLLM's head would round them to bfloat16.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:  # whatever starts a server imports this without torch
    from torch import Tensor

LOGPROBS_MODE = "processed_logprobs"  # that an engine has to be started with
HEAD = {"head_dtype": "float32"}  # changes to the model's configuration ("hf_overrides") that one is started with

V1_PARAMETERS = ["logits", "generators", "k", "p"]
V1_TEMPERATURE = ["logits", "temp", "all_random"]
V2_PARAMETERS = [
    *("processed_logits", "expanded_idx_mapping", "idx_mapping_np", "pos"),
    *("top_k", "top_p", "use_fused_sampler"),
]
V2_MIN_P = ["logits", "expanded_idx_mapping", "idx_mapping_np"]


def ignore_truncation(model_runner: Any) -> str:
    """Make this model runner's sampler give log-probabilities over the whole vocabulary at the sampling temperature.

    Returns "" when that is done, else the reason why this vLLM's sampler cannot be wrapped. Without truncation the
    log-probabilities stay as they are, to the bit. Call it once per model runner, in the process that has it.
    """
    from vllm.v1.sample.sampler import Sampler
    from vllm.v1.worker.gpu.sample.sampler import Sampler as SamplerV2  # of vLLM's model runner V2

    sampler = model_runner.sampler
    if type(sampler) is Sampler:
        draws = sampler.topk_topp_sampler
        if problem := _differs(draws.forward, V1_PARAMETERS) or _differs(sampler.apply_temperature, V1_TEMPERATURE):
            return problem
        draws.logprobs_mode = "raw_logprobs"  # its own, after truncation, are not read
        whole: list[Tensor] = []  # log-probabilities of the step that is being made
        sampler.apply_temperature = _noting(sampler.apply_temperature, sampler.compute_logprobs, whole)  # type: ignore[method-assign]
        draws.forward = _with_whole_logprobs(draws.forward, whole)
        return ""
    if type(sampler) is SamplerV2:
        states = sampler.sampling_states
        if problem := _differs(sampler._sample_random, V2_PARAMETERS) or _differs(states.apply_min_p, V2_MIN_P):
            return problem
        before: list[Tensor] = []  # logits of the step that is being made, if min-p truncates them
        states.apply_min_p = _keeping(states.apply_min_p, states.min_p.np, before)  # type: ignore[method-assign]
        sampler._sample_random = _with_whole_logits(sampler._sample_random, before)  # type: ignore[method-assign]
        return ""
    return f"its sampler is {type(sampler).__module__}.{type(sampler).__qualname__}, which is not known here"


def _noting(
    scale: Callable[..., Tensor], log_softmax: Callable[[Tensor], Tensor], whole: list[Tensor]
) -> Callable[..., Tensor]:
    """Wrap vLLM's `scale`, after which min-p, top-k and top-p truncate, to note the log-probabilities. (B, V)"""

    def scale_and_note(logits: Tensor, temp: Tensor, all_random: bool) -> Tensor:
        scaled = scale(logits, temp, all_random)
        whole[:] = [log_softmax(scaled)]
        return scaled

    return scale_and_note


def _with_whole_logprobs(draw: Callable[..., Any], whole: list[Tensor]) -> Callable[..., Any]:
    """Wrap vLLM's `draw`, which truncates, draws and returns tokens and log-probabilities. (B, V) → (B,), (B, V)"""

    def draw_and_report(
        logits: Tensor, generators: dict[int, Any], k: Tensor | None, p: Tensor | None
    ) -> tuple[Tensor, Tensor]:
        return draw(logits, generators, k, p)[0], whole.pop()

    return draw_and_report


def _keeping(truncate: Callable[..., None], min_p: Any, before: list[Tensor]) -> Callable[..., None]:
    """Wrap vLLM's `truncate`, which leaves out tokens in place, to keep the logits before it. (B, V)"""

    def keep_and_truncate(logits: Tensor, rows: Tensor, rows_np: Any) -> None:
        before[:] = [logits.clone()] if min_p[rows_np].any() else []
        truncate(logits, rows, rows_np)

    return keep_and_truncate


def _with_whole_logits(draw: Callable[..., Any], before: list[Tensor]) -> Callable[..., Any]:
    """Wrap vLLM's `draw`, which truncates, draws and returns tokens and the logits of their log-probabilities."""

    def draw_and_report(
        logits: Tensor, rows: Tensor, rows_np: Any, pos: Tensor, top_k: Tensor | None, top_p: Tensor | None, fused: bool
    ) -> tuple[Tensor, Tensor]:
        untouched = logits if top_k is None and top_p is None else logits.clone()  # `draw` may truncate in place
        whole = before.pop() if before else untouched
        return draw(logits, rows, rows_np, pos, top_k, top_p, fused)[0], whole

    return draw_and_report


def _differs(function: Callable[..., Any], parameters: list[str]) -> str:
    found = list(inspect.signature(function).parameters)
    return "" if found == parameters else f"its {function.__qualname__} takes {found}, expected are {parameters}"
