"""A whole training by plain loops in float64, over the completions that it has recorded.

Of the product: the configuration as read, the order of a generation batch's rows, an adapter's first weights. Of the
run: prompts, tokens, the engine's log-probabilities, rewards.
"""

from __future__ import annotations

import copy
import json
import math
import re
import statistics
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest
import torch
from peft import PeftModel
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoTokenizer
from transformers.models.mixtral.modeling_mixtral import load_balancing_loss_func

from grpo_core.config.files import load_config
from grpo_core.config.run import RunConfig
from grpo_core.data.order import training_order
from grpo_core.model.loading import with_adapter
from grpo_core.planning.plan import Plan, load_plan
from grpo_core.rollout.types import Sampling
from tests.grpo_core.algorithm.plain_losses import Cut, PlainRow, plain
from tests.grpo_core.rollout.vllm_engine import can_be_drawn
from tests.grpo_core.training.training import metrics_of


def assert_plain(run: Path) -> None:
    """Each update's loss and gradient norm, and the weights in the end, relative to how far they have moved; up to the
    first update in which rounding decides what is computed."""
    config = load_config(run / "config.toml")
    before, trained = load_policy(config), load(run / "training" / "model")
    steps, after = plain_training(run)
    bound = 2e-5 / min(2 * config.rollout.temperature, 1.0)  # float32 rounds logits before they are divided by it
    whole = after is not None
    assert steps, "two tokens are tied in the first update, and nothing would be compared: draw another run"
    for step, (found, (loss, norm, taught, diverges)) in enumerate(zip(metrics_of(run), steps, strict=whole)):
        if step == 1:
            bound *= 2.5  # from here on, an update begins with the rounding of those before it
        if taught:
            mean, atol = statistics.mean(taught), 1e-4 / min(config.rollout.temperature, 1)
            assert found["teacher_kl"] == pytest.approx(mean, rel=bound, abs=atol)
        else:
            assert "teacher_kl" not in found
        if diverges:
            assert found["teacher_divergence"] == pytest.approx(statistics.mean(diverges), rel=bound, abs=1e-6)
        else:
            assert "teacher_divergence" not in found
        assert found["loss"] == pytest.approx(loss, rel=bound, abs=1e-6)
        assert found["grad_norm"] == pytest.approx(norm, rel=bound, abs=1e-6)
    if whole:
        first, found, expected = (_weights(model) for model in (before, trained, after))
        assert (found - expected).norm() < bound * (expected - first).norm() + 1e-6


class _TiedError(Exception):
    pass


def load(folder: Path | str) -> Any:
    return AutoModelForCausalLM.from_pretrained(folder, experts_implementation="eager")


def load_policy(config: RunConfig) -> Any:
    model = load(config.model.name_or_path)
    torch.manual_seed(config.seed)
    if config.model.adapter:
        model = PeftModel.from_pretrained(model, config.model.adapter, is_trainable=True)
    else:
        model = with_adapter(model, config.model)
    return model.double().eval()


def _weights(model: Any) -> Tensor:
    model = model.merge_and_unload() if isinstance(model, PeftModel) else model
    return torch.cat([weight.flatten().double() for weight in model.state_dict().values()])


def plain_training(run: Path) -> tuple[list[tuple[float, float, list[float], list[float]]], Any]:
    """Loss, gradient norm and the terms of `teacher_kl` and `teacher_divergence` of each update, and the trained model;
    None, and the updates until then, if at some token two of a teacher's are equally likely up to float32's rounding,
    and only one is among the `divergence_top_k`."""
    config, plan = load_config(run / "config.toml"), load_plan(run / "plan.json")
    keys, model = config.train, load_policy(config)
    base, parameters = copy.deepcopy(model), [p for p in model.parameters() if p.requires_grad]
    groups = [{"params": [p for p in parameters if (p.ndim > 1) == decays]} for decays in (True, False)]
    groups[0]["weight_decay"], groups[1]["weight_decay"] = keys.weight_decay, 0.0
    optimizer = torch.optim.AdamW(
        [group for group in groups if group["params"]],
        betas=(keys.adam_beta1, keys.adam_beta2),
        eps=keys.adam_epsilon,
    )
    current, steps = -1, list[tuple[float, float, list[float], list[float]]]()
    average = copy.deepcopy(model)
    for step, micro_steps in enumerate(_updates(config, plan)):
        loss, routed = torch.zeros((), dtype=torch.float64), list[tuple[Tensor, ...]]()
        taught, diverges = list[float](), list[float]()
        for index, place in micro_steps:
            if index != current:
                current = index
                batch = _Batch(run, config, plan, index, model, base, average if config.teacher.update_rate else model)
            try:
                loss = loss + batch.loss(model, place, len(micro_steps), diverges)
            except _TiedError:
                return steps, None
            taught += batch.teacher_kl(place, model)
            if config.algorithm.router_aux_loss_coef:
                routed += [batch.router_logits(model, row) for row in batch.order[place].flatten().tolist()]
        if routed:
            logits = tuple(torch.cat(of_layer) for of_layer in zip(*routed, strict=True))
            experts, chosen = model.config.num_experts, model.config.num_experts_per_tok
            loss = loss + config.algorithm.router_aux_loss_coef * load_balancing_loss_func(logits, experts, chosen)
        warm, whole = plan.warmup_steps, len(metrics_of(run))
        rate = keys.learning_rate * (step / warm if step < warm else (whole - step) / (whole - warm))
        optimizer.zero_grad()
        loss.backward()
        norm = math.sqrt(sum(float(p.grad.square().sum()) for p in parameters if p.grad is not None))
        steps.append((loss.item(), norm, taught, diverges))
        for p in parameters:
            p.grad = torch.zeros_like(p) if p.grad is None else p.grad * min(1.0, keys.max_grad_norm / (norm or 1.0))
        for group in optimizer.param_groups:
            group["lr"] = rate
        optimizer.step()
        for old, new in zip(average.parameters(), model.parameters(), strict=True):
            share = config.teacher.update_rate or 0.0
            old.data = (1 - share) * old.data + share * new.data
    return steps, model


def _updates(config: RunConfig, plan: Plan) -> Iterator[list[tuple[int, int]]]:
    """Of each update its micro-steps, by walking through epochs: a generation batch and a place in it."""
    keys, g = config.train, config.rollout.num_generations
    a, s = keys.gradient_accumulation_steps, plan.steps_per_generation
    chunks = plan.num_prompts // (keys.per_device_train_batch_size * keys.num_processes * s // g)
    assert keys.max_steps
    left, epoch = keys.max_steps, 0
    while left:
        walk = [
            (epoch * chunks + chunk, place)
            for chunk in range(chunks)
            for _ in range(keys.num_iterations)
            for place in range(s)
        ]
        parts = [walk[at : at + a] for at in range(0, len(walk), a)]
        yield from parts[:left]
        left, epoch = left - len(parts[:left]), epoch + 1


class _Batch:
    """A generation batch: what was sampled, and what the policy said of it before the first update."""

    def __init__(self, run: Path, config: RunConfig, plan: Plan, index: int, model: Any, base: Any, itself: Any):
        """`itself`: what teaches where no other model does."""
        self.config, self.plan, algorithm = config, plan, config.algorithm
        self.rows = pq.read_table(run / "training" / "completions" / f"rollout-{index:06d}.parquet").to_pylist()
        self.order = training_order(plan, config.seed, index)
        self.masks = [
            torch.tensor(row.get("trained_tokens") or [1] * len(row["completion_ids"])).bool()
            & (not (algorithm.mask_truncated_completions and row["truncated"]))
            for row in self.rows
        ]
        self.engine = [
            torch.tensor(row["sampling_logprobs"]).double()[mask]
            for row, mask in zip(self.rows, self.masks, strict=True)
        ]
        self.lengths = [int(mask.sum()) for mask in self.masks]
        with torch.no_grad():
            old = [self.tokens(model, row) for row in range(len(self.rows))]
            self.old = [logprobs.tolist() for logprobs, _ in old]
            rollout = config.rollout
            if rollout.repetition_penalty == 1 and rollout.engine != "recorded" and not rollout.max_staleness:
                # A low temperature makes rounding in the logits larger.
                atol = 1e-4 / min(config.rollout.temperature, 1)
                assert torch.allclose(torch.cat(self.engine), torch.cat([each for each, _ in old]), atol=atol)
            self.reference = [self.tokens(base, row, whole=True)[0].tolist() for row in range(len(self.rows))]
        entropies = [entropy for _, entropy in old]
        least = torch.cat(entropies).quantile(1 - algorithm.top_entropy_quantile) if sum(self.lengths) else 0
        kept = algorithm.top_entropy_quantile < 1
        self.keep = [((entropy >= least - 1e-5) | (not kept)).double() for entropy in entropies]
        self.advantages = _advantages(config, self.rows)
        self.teacher: list[list[float] | None] = [None] * len(self.rows)
        self.taught_by: list[str | None] = [None] * len(self.rows)
        if config.teacher.model or config.teacher.template:
            self.read: list[list[int] | None] = [record["prompt_ids"] for record in self.rows]  # None: nothing to show
            if config.teacher.template:
                self.read = shown_prompts(run, config, self.rows)
            self.taught_by = names = teachers_of(run, config, self.rows)
            self.models = {name: load(name).double().eval() for name in {*names} if name} or {None: itself}
            self.asks_teacher([*range(len(self.rows))], self.old)

    def asks_teacher(self, rows: list[int], own: Any) -> None:
        """Note what the teacher says as it is now; the policy's own words where nothing is shown, and of a source
        without a teacher."""
        with torch.no_grad():
            for row in rows:
                name, read = self.taught_by[row], self.read[row]
                self.teacher[row] = own[row]
                if read and name != "":
                    self.teacher[row] = self.tokens(self.models[name], row, whole=True, prompt=read)[0].tolist()

    def teacher_kl(self, place: int, model: Any) -> list[float]:
        """log π_old − log π_teacher of each taught token of a micro-step; for a divergence, of policy and teacher in
        the update."""
        if not self.config.teacher.is_used:
            return []
        rows = [row for row in self.order[place].flatten().tolist() if self.taught_by[row] != "" and self.read[row]]
        own: Any = self.old
        if self.config.teacher.divergence_beta is not None:
            with torch.no_grad():
                own = {row: self.tokens(model, row)[0].tolist() for row in rows}
            self.asks_teacher(rows, own)
        return [old - said for row in rows for old, said in zip(own[row], self.teacher[row] or [], strict=False)]

    def divergence(self, model: Any, row: int) -> Tensor:
        """From the teacher's distribution, where the trained tokens are predicted."""
        keys, ids, scale = self.config.teacher, self.rows[row]["completion_ids"], self.config.rollout.temperature
        beta, k, reads = keys.divergence_beta, keys.divergence_top_k, self.read[row]
        assert reads

        def distributions(model: Any, prompt: list[int]) -> Tensor:
            logits = model(input_ids=torch.tensor([prompt + ids])).logits[0, len(prompt) - 1 : -1]
            return (logits / scale).softmax(-1)[self.masks[row]]

        p = distributions(model, self.rows[row]["prompt_ids"])
        q = distributions(self.models[self.taught_by[row]], reads).detach()[:, : p.shape[1]]
        if k:
            order = q.argsort(descending=True)
            p, q = (each.gather(1, order) for each in (p, q))
            if (q[:, k - 1] < q[:, k] * (1 + 1e-5)).any():
                raise _TiedError
            p, q = (torch.cat([each[:, :k], each[:, k:].sum(1, keepdim=True)], 1) for each in (p, q))
        m = {0: p, 1: q}.get(beta, beta * q + (1 - beta) * p)
        to_q, to_p = (q * (q / m).log()).sum(1), (p * (p / m).log()).sum(1)
        return {0: to_q, 1: to_p}.get(beta, beta * to_q + (1 - beta) * to_p)

    def tokens(
        self, model: Any, row: int, *, whole: bool = False, prompt: list[int] | None = None
    ) -> tuple[Tensor, Tensor]:
        """Log-probabilities and entropies of the trained tokens, among those that can be drawn."""
        keys, record = self.config.rollout, self.rows[row]
        prompt, ids = prompt or record["prompt_ids"], record["completion_ids"]
        logits = model(input_ids=torch.tensor([prompt + ids])).logits[0, len(prompt) - 1 : -1] / keys.temperature
        drawing = Sampling(1, top_p=keys.top_p, top_k=keys.top_k, min_p=keys.min_p)
        for place in range(len(ids)) if drawing.is_truncated and not whole else ():
            left = can_be_drawn(logits[place].log_softmax(-1).tolist(), drawing) | {ids[place]}
            drop = torch.tensor([token not in left for token in range(logits.shape[1])])
            logits = torch.cat([logits[:place], logits[place : place + 1].masked_fill(drop, -1e9), logits[place + 1 :]])
        logprobs = logits.log_softmax(-1)
        chosen, entropy = logprobs[range(len(ids)), ids], -(logprobs.exp() * logprobs).sum(-1)
        return chosen[self.masks[row]], entropy[self.masks[row]]

    def router_logits(self, model: Any, row: int) -> tuple[Tensor, ...]:
        """Router logits where the trained tokens are predicted, per layer. (tokens, E)"""
        prompt, ids = (self.rows[row][name] for name in ("prompt_ids", "completion_ids"))
        output = model(input_ids=torch.tensor([prompt + ids]), output_router_logits=True)
        return tuple(logits[len(prompt) - 1 : -1][self.masks[row]] for logits in output.router_logits)

    def loss(self, model: Any, place: int, micro_steps: int, diverges: list[float]) -> Tensor:
        """Share of a micro-step in the loss of its update; its gradient is right, too. The divergence of each taught
        token is appended to `diverges`."""
        algorithm, plan, found = self.config.algorithm, self.plan, torch.zeros((), dtype=torch.float64)
        limit, all_tokens, s = self.config.rollout.max_completion_length, sum(self.lengths), plan.steps_per_generation
        for of_process in self.order[place].tolist():
            tokens, b, w = sum(self.lengths[row] for row in of_process), len(of_process), len(self.order[place])
            for row in of_process:
                cut = Cut(self.lengths[row], tokens, b, micro_steps, max(all_tokens, 1), s, w, limit)
                logprobs, entropy = self.tokens(model, row)
                now = logprobs.tolist()
                keep, engine = self.keep[row], self.engine[row].tolist()
                reads = (now, self.old[row], self.reference[row], keep.tolist(), engine)
                by_advantage = self.config.teacher.divergence_beta is None
                taught = self.teacher[row] if by_advantage else None, self.config.teacher.weight
                of_row = PlainRow(algorithm, self.advantages[row], *reads, *taught)
                slopes = torch.tensor(of_row.slopes(), dtype=torch.float64)
                value = of_row.loss(now) + (slopes * (logprobs - logprobs.detach())).sum()
                if not by_advantage and self.taught_by[row] != "" and self.read[row]:
                    of_tokens = self.divergence(model, row)
                    value = value + self.config.teacher.weight * of_tokens.sum()
                    diverges += of_tokens.tolist()
                found = found + value / (plain(algorithm.loss_type).divisor(cut) * w)
                kept = max(float(torch.cat(self.keep).sum()), 1.0) * micro_steps / s
                found = found - algorithm.entropy_coef * (keep * entropy).sum() / kept
        return found


def teachers_of(run: Path, config: RunConfig, rows: list[dict[str, Any]]) -> list[str | None]:
    """What teaches each row: the model that its source names, "" for none, or else that of all."""
    data = pq.read_table(run / "dataset" / "train.parquet").to_pylist()
    own = {it.name: it.teacher for it in config.data.sources if it.teacher is not None}
    return [own.get(data[row["row"]].get("source"), config.teacher.model) for row in rows]


def shown_prompts(run: Path, config: RunConfig, rows: list[dict[str, Any]]) -> list[list[int] | None]:
    """Token ids of the prompts that the template makes: the recorded ones, with their user's text replaced."""
    data = pq.read_table(run / "dataset" / "train.parquet").to_pylist()
    tokenizer, g = AutoTokenizer.from_pretrained(config.model.name_or_path), config.rollout.num_generations
    weights = [it.weight for it in config.rewards]
    weights = weights if any(weights) else [1.0] * len(weights)
    found: list[list[int] | None] = []
    for place, row in enumerate(rows):
        group = rows[place // g * g : place // g * g + g]
        given = [[each[f"rewards/{it.name}"] for it in config.rewards] for each in group]
        sums = [sum(w * v for w, v in zip(weights, values, strict=True) if v is not None) for values in given]
        best = sums.index(max(sums))
        texts: dict[str, Any] = {name: value for name, value in data[row["row"]].items() if name != "prompt"}
        texts["better"] = group[best]["completion"] if sums[best] > sums[place % g] else ""
        answers = [each["content"] for each in json.loads(row.get("conversation") or "[]") if each["role"] == "tool"]
        texts["error"] = "\n".join(answer for answer in answers if answer.startswith("Error: "))
        prompt = data[row["row"]]["prompt"]
        texts["prompt"] = asked = prompt if isinstance(prompt, str) else prompt[-1]["content"]
        parts = re.findall(r"([^{}]*)(?:{(\w+)})?", config.teacher.template or "")
        if any(name and not texts.get(name) for _, name in parts):
            found.append(None)
            continue
        text = "".join(before + texts.get(name, "") for before, name in parts)
        if not isinstance(prompt, str):
            text = tokenizer.decode(row["prompt_ids"], skip_special_tokens=False).replace(asked, text, 1)
        found.append(tokenizer(text, add_special_tokens=isinstance(prompt, str))["input_ids"])
    return found


def _advantages(config: RunConfig, rows: list[dict[str, Any]]) -> list[float]:
    g, scale = config.rollout.num_generations, config.algorithm.scale_rewards
    sums = [
        sum(it.weight * value for it in config.rewards if (value := row[f"rewards/{it.name}"]) is not None)
        for row in rows
    ]
    found = []
    for at in range(0, len(rows), g):
        group = sums[at : at + g]
        spread = {"group": group, "batch": sums, "none": None}[scale]
        divisor = 1.0 if spread is None or len(spread) < 2 else statistics.stdev(spread) + 1e-4
        silent = max(group) - min(group) < 1e-12
        found += [0.0 if silent else (value - statistics.mean(group)) / divisor for value in group]
    return found
