"""The pace of this machine at one model, measured in seconds: sampling, passes, optimizer, start, writing.

Entry point: `python -m grpo_core.pace REQUEST STARTED`, with a `PaceRequest` as JSON and the time at which it
was started, in seconds since 1970. The last line that it prints is the `Pace` as JSON, or {"refused": why} for weights
that the training would refuse. It samples and trains with the training's own engine, policy and optimizer: a small
model as it is; of a large one, its first layers, one or two of each that differ, from which the time of all is
extrapolated. On a GPU, where vLLM samples, the transformers engine stands in for it.
"""

from __future__ import annotations

import copy
import hashlib
import json
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict
from itertools import cycle, islice
from pathlib import Path
from typing import Any, NamedTuple

from grpo_core.errors import ConfigError
from grpo_core.planning.pace import Pace, PaceRequest
from grpo_core.system.libraries import quiet_libraries
from grpo_core.system.processes import importing, run_and_leave

if __name__ == "__main__":
    quiet_libraries()  # before they are imported
with importing():
    import pyarrow.parquet as pq
    import torch
    from transformers import AutoConfig

    import grpo_core.training.loop  # noqa: F401 (all that a training imports, whose time counts)
    from grpo_core.config.inputs import ModelConfig
    from grpo_core.config.training import TrainConfig
    from grpo_core.data.chat import encode_prompts
    from grpo_core.data.prompts import load_tokenizer
    from grpo_core.model.capabilities import STATES
    from grpo_core.model.loading import load_model, with_adapter
    from grpo_core.model.policy import Policy
    from grpo_core.model.pretrained import from_config, from_pretrained, without_weights
    from grpo_core.model.sequences import Sequences, pack, pad
    from grpo_core.model.small_copy import is_per_layer
    from grpo_core.rollout.loading import check_lengths
    from grpo_core.rollout.transformers_engine import TransformersEngine
    from grpo_core.rollout.types import Request, Sampling
    from grpo_core.training.optimizer import adamw
    from grpo_core.training.out_of_memory import CPU_TOKENS

WHOLE = 200_000_000  # parameters up to which a model is measured as it is
FEWEST_LAYERS = 3  # of a model that is cut, in periods of its kinds
LONGEST_PERIOD = 8  # layers; more of a large model would not fit beside other work
SAMPLING_SECONDS, TRAINING_SECONDS = 3.0, 3.0  # after these, what is left is extrapolated
REPEATS = 3  # of a short measurement: its fastest counts, which another process has disturbed least
WRITTEN = 2**24  # bytes
WEIGHT_SECONDS = 4 / 1e9  # assumed: per float32 parameter that is loaded


def main() -> None:
    request, started = PaceRequest(**json.loads(sys.argv[1])), float(sys.argv[2])
    try:
        found = asdict(measure(request, started))
    except ConfigError as error:
        found = {"refused": str(error)}
    print(json.dumps(found), flush=True)


class _Seconds(NamedTuple):
    sample: float
    train: float
    step: float


def measure(request: PaceRequest, started: float) -> Pace:
    """Measure what the request asks for. `started`: when this process was started, in seconds since 1970."""
    keys = ModelConfig(**request.model)
    shape = from_pretrained(AutoConfig, keys.name_or_path, keys.revision)
    parameters = sum(parameter.numel() for parameter in without_weights(shape).parameters())
    layers = shape.get_text_config().num_hidden_layers
    tokenizer = load_tokenizer(keys)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    period = _period(getattr(shape.get_text_config(), "layer_types", None) or [])
    if parameters <= WHOLE or layers < FEWEST_LAYERS * period:
        model, real = _load_whole(keys, shape)
        prompts = _prompts(request, tokenizer) if real else []
        found, tokens, ready = _measure_model(request, model.to(device), tokenizer, prompts)
        start, what = ready - started, f"the model{'' if real else ' (without its weights)'}"
    else:
        one, tokens, ready = _measure_model(request, _sliced(shape, period).to(device), tokenizer, [])
        start = ready - started + WEIGHT_SECONDS * parameters
        two, _, _ = _measure_model(request, _sliced(shape, 2 * period).to(device), tokenizer, [])
        found = _Seconds(*(a + (layers / period - 1) * max(b - a, 0.0) for a, b in zip(one, two, strict=True)))
        what = f"{period} and {2 * period} of its {layers} layers"
    lengths = "as sampled" if tokens < request.rollout["max_completion_length"] else "of full length"
    where = torch.cuda.get_device_name() if device.type == "cuda" else f"CPU with {os.cpu_count()} cores"
    threads = "" if device.type == "cuda" else f", {request.threads} threads"
    return Pace(
        sample_seconds=found.sample,
        train_seconds=found.train,
        step_seconds=found.step,
        start_seconds=start,
        byte_seconds=_byte_seconds(Path(request.folder)),
        completion_tokens=tokens,
        completions=request.completions,
        how=(
            f"no earlier run is known; measured on this {where}{threads}, with {what}: "
            f"{request.completions} completions sampled in {found.sample:.2g} s, "
            f"{request.train['per_device_train_batch_size']} trained on in {found.train:.2g} s, completions {lengths} "
            f"({tokens:.0f} tokens)"
            + ("; sampling by transformers, in place of vLLM" if device.type == "cuda" else "")
            + ("; without what a base of 4 bits takes" if keys.load_in_4bit else "")
        ),
    )


def _period(kinds: Sequence[str]) -> int:
    """After how many layers their kinds repeat, where some carry a state: such a model does not run with these alone. 1
    for others, which take about as long whatever their kind, and where nothing repeats soon."""
    if not STATES & {*kinds}:
        return 1
    return next((n for n in range(1, min(len(kinds), LONGEST_PERIOD + 1)) if [*kinds[n:]] == [*kinds[:-n]]), 1)


def _load_whole(keys: Any, shape: Any) -> tuple[Any, bool]:
    """Return the model, and whether it has its own weights: they may not be on this machine."""
    try:
        return load_model(keys.name_or_path, keys.revision), True
    except OSError:
        return from_config(shape, dtype=torch.float32).eval(), False


def _sliced(shape: Any, layers: int) -> Any:
    """Make the first layers of a model of this shape, with random weights."""
    shape = copy.deepcopy(shape)
    text, depth = shape.get_text_config(), shape.get_text_config().num_hidden_layers
    for name, value in [*vars(text).items()]:  # of some, a property gives the kinds for any number of layers
        if is_per_layer(value, depth):
            setattr(text, name, value[:layers])
    text.num_hidden_layers = layers
    return from_config(shape, dtype=torch.float32).eval()


def _prompts(request: PaceRequest, tokenizer: Any) -> list[list[int]]:
    """Return the first prompts of the run, as many as are sampled together."""
    if not request.prompts:
        return []
    wanted = request.completions // request.rollout["num_generations"]
    rows = next(pq.ParquetFile(request.prompts).iter_batches(batch_size=wanted, columns=["prompt"])).to_pylist()
    encoded = encode_prompts([row["prompt"] for row in rows], tokenizer, request.chat_template_kwargs)
    return list(islice(cycle(encoded), wanted))


def _measure_model(
    request: PaceRequest, base: Any, tokenizer: Any, prompts: list[list[int]]
) -> tuple[_Seconds, float, float]:
    """Measure one model: seconds, mean tokens of its completions, and the time at which it was ready to train.

    Without `prompts`, random tokens are the prompts, and completions end at full length.
    """
    rollout, train = request.rollout, request.train
    group, longest = rollout["num_generations"], rollout["max_completion_length"]
    groups = request.completions // group
    torch.manual_seed(0)
    model = with_adapter(base, ModelConfig(**request.model))
    max_length = max([request.prompt_tokens, *map(len, prompts)]) + longest
    check_lengths(model, max_length)
    policy = Policy(
        model,
        rollout["temperature"],
        max_length=max_length,
        bf16=train["mixed_precision"] == "bf16",
        gradient_checkpointing=train["gradient_checkpointing"],
    )
    engine = TransformersEngine(policy.model, tokenizer, max_length)
    ready = time.time()
    stop = tuple(rollout["stop"]) if prompts else ()
    if not prompts:
        vocabulary = base.config.get_text_config().vocab_size
        prompts = torch.randint(vocabulary, (groups, request.prompt_tokens)).tolist()
        engine.end_ids = torch.tensor([], dtype=torch.int64)
    requests = [Request(ids, group, seed=group * number) for number, ids in enumerate(prompts)]
    drawing = {key: rollout[key] for key in ("temperature", "top_p", "top_k", "min_p", "repetition_penalty")}
    sampling = Sampling(longest, **drawing, stop=stop)
    sample_seconds, lengths = _sample(engine, requests, sampling)
    train_seconds, step_seconds = _train(policy, prompts, lengths, group, train)
    return _Seconds(sample_seconds, train_seconds, step_seconds), statistics.mean(lengths), ready


def _sample(engine: Any, requests: list[Any], sampling: Any) -> tuple[float, list[int]]:
    """Return the seconds to sample the requests, and the tokens of each completion.

    The rest after SAMPLING_SECONDS is extrapolated from the median step, at full length.
    """
    best = float("inf")
    for _ in range(REPEATS):
        start = last = time.perf_counter()
        steps: list[float] = []
        lengths = [sampling.max_tokens] * sum(request.num_completions for request in requests)
        for finished in engine.generate(requests, sampling):
            now = time.perf_counter()
            steps.append(now - last)
            last = now
            for number, completions in finished:
                first = number * requests[0].num_completions
                lengths[first : first + len(completions)] = [len(completion.ids) for completion in completions]
            if now - start > SAMPLING_SECONDS and len(steps) > 1 and len(steps) < sampling.max_tokens:
                left = sampling.max_tokens - len(steps)
                return sum(steps) + left * statistics.median(steps[1:]), lengths
        best = min(best, sum(steps))
        if sum(steps) > SAMPLING_SECONDS / REPEATS:
            break
    return best, lengths


def _train(
    policy: Any, prompts: list[list[int]], lengths: list[int], group: int, train: dict[str, Any]
) -> tuple[float, float]:
    """Seconds of the forward and backward pass over the completions of a micro-step, and of the optimizer's step."""
    rows = train["per_device_train_batch_size"]
    owners = [row // group % len(prompts) for row in range(rows)]
    completions = list(islice(cycle(lengths), rows))
    ids = [prompts[owner] + [0] * length for owner, length in zip(owners, completions, strict=True)]
    sequences = Sequences(
        pad(ids, torch.int64),
        torch.tensor([len(prompts[owner]) for owner in owners]),
        torch.tensor(completions),
        torch.tensor(owners),
    )
    device = next(policy.model.parameters()).device
    tokens = train["max_tokens_per_pass"] or rows * int(sequences.lengths.max())
    if device.type == "cpu":
        tokens = min(tokens, CPU_TOKENS)
    parts = list(pack(sequences, tokens, share_prompts=policy.packs))

    def passes() -> float:
        start, done = time.perf_counter(), 0
        for part in parts:
            logprobs, _ = policy(policy.prepare(sequences.take(part)))
            logprobs.sum().backward()
            _synchronize(device)
            done += len(part)
            if time.perf_counter() - start > TRAINING_SECONDS:
                break
        return (time.perf_counter() - start) * rows / done

    trained = [parameter for parameter in policy.master.parameters() if parameter.requires_grad]
    optimizer = adamw([{"params": trained}], TrainConfig(optim=train["optim"], offload=train["offload"]))

    def step() -> float:
        start = time.perf_counter()
        optimizer.step()
        policy.refresh()
        _synchronize(device)
        return time.perf_counter() - start

    return _fastest(passes, TRAINING_SECONDS), _fastest(step, 1.0)


def _fastest(work: Callable[[], float], budget: float) -> float:
    """Return the smallest result of `work`, its duration in seconds, repeated as long as the budget lasts."""
    start, best = time.perf_counter(), work()
    for _ in range(REPEATS - 1):
        if time.perf_counter() - start > budget:
            break
        best = min(best, work())
    return best


def _synchronize(device: Any) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def _byte_seconds(folder: Path) -> float:
    """Seconds per byte that is written to the disk in `folder`, flushed, and hashed as a checkpoint is."""
    content = os.urandom(WRITTEN)
    start = time.perf_counter()
    with tempfile.TemporaryFile(dir=folder) as file:
        file.write(content)
        file.flush()
        os.fsync(file.fileno())
    hashlib.blake2b(content)
    return (time.perf_counter() - start) / WRITTEN


if __name__ == "__main__":
    run_and_leave(main)
