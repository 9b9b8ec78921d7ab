"""Evaluate base, champion and trained policy on the same prompts, set by set, each prompt once."""

from __future__ import annotations

import hashlib
import json
import time
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import polars as pl

from grpo_core import run_files
from grpo_core.config.files import load_config
from grpo_core.config.metrics import evaluated_metric
from grpo_core.config.run import RunConfig
from grpo_core.evaluation.samples import answer_columns, answers_of, prompt_columns, samples_table
from grpo_core.fingerprint import environment_parts, reward_parts
from grpo_core.planning.plan import load_plan
from grpo_core.rewards.trl_arguments import TrainerState
from grpo_core.system.processes import importing

if TYPE_CHECKING:
    from grpo_core.rollout.collect import Sample


def evaluate(
    run: Path, output: Path, champion: Path | None = None, earlier: Path | None = None, known: Sequence[str] = ()
) -> dict[str, Any]:
    """Evaluate all policies and return their report. Writes samples.parquet (one row per completion) under `output`.

    earlier: samples.parquet of another run, evaluated the same way, from which the answers of the policies `known`
    (base, champion) are taken instead of sampled again.

    Several processes hold each policy as train.sharding says, and each samples its share of the prompts; the main one
    returns the report, the others return {}.

    A champion with another architecture or tokenizer than the run's base model is left out: the engine cannot sample
    from it. The caller, which knows what the folder is, fills in "champion" of the report.
    """
    begun = time.monotonic()
    with importing():
        from grpo_core.distributed import own_range, wait_for_all
        from grpo_core.evaluation.base_policy import load_base
        from grpo_core.evaluation.comparison import compare_policies
        from grpo_core.evaluation.outcomes import deciding_metric
        from grpo_core.model.divergence import mean_kl
        from grpo_core.model.loading import load_model
        from grpo_core.rollout.collect import share_samples
        from grpo_core.rollout.requests import evaluation_request, evaluation_sampling

    config = load_config(run / run_files.CONFIG)
    files = {name: run_files.prompts(run, file) for name, file in config.evaluation_files.items()}
    plan = load_plan(run / run_files.PLAN)
    state = TrainerState.after(plan.max_steps, plan)
    loaded = load_base(config, files, config.evaluation_length, state)
    config, processes, engine, base = loaded.config, loaded.processes, loaded.engine, loaded.model
    sets, rewards, is_main = loaded.sets, loaded.scoring.rewards, processes.is_main_process
    sampling, n = evaluation_sampling(config), config.evaluation.num_samples
    follows_plan = any(reward.reads_state for reward in rewards)
    if follows_plan:  # the earlier rewards are of another training's end
        earlier = None
    as_base = {"dtype": loaded.dtype, "device": processes.device, "shard": loaded.shard}
    columns = {name: prompt_columns(name, prompts.rows, config) for name, prompts in sets.items()}
    policies: list[str] = []

    def sample_share(name: str) -> tuple[list[Sample], float]:
        prompts = sets[name]
        rows = own_range(len(prompts.ids))
        return loaded.sample(name, [evaluation_request(config, prompts, row, n) for row in rows], rows, sampling)

    def sample(policy: str, model: Any) -> None:
        policies.append(policy)
        for name, prompts in sets.items():
            if is_main:
                print(f"evaluating the {policy} policy on {len(prompts.ids)} prompts ({name})", flush=True)
            samples, *_ = share_samples(partial(sample_share, name))
            columns[name] |= answer_columns(policy, samples, rewards)
            if model is not base:
                asked = [sample.prompt_ids for sample in samples]
                completed = [sample.completion.ids for sample in samples]
                masks = [sample.completion.mask for sample in samples]
                columns[name][f"{policy}/kl"] = mean_kl(model, base, asked, completed, masks)

    def sample_from(policy: str, folder: Path) -> None:
        """Sample a policy, whose weights go when this returns: one beside the base is enough."""
        model = load_model(folder, **as_base)
        engine.sync_weights(model)
        sample(policy, model)

    def take(policy: str, answers: Path) -> None:
        policies.append(policy)
        for name, of_set in answers_of(policy, answers, columns).items():
            columns[name] |= of_set

    start_seconds = time.monotonic() - begun
    if earlier and "base" in known:
        take("base", earlier)
    else:
        sample("base", base)
    if earlier and "champion" in known:
        take("champion", earlier)
    elif champion is not None:
        part = _incompatible_part(base, champion, loaded.scoring.tokenizer)
        if not part:
            sample_from("champion", champion)
        elif is_main:
            print(f"the champion is left out: it has another {part} than {config.model.name_or_path}", flush=True)
    sample_from("trained", run / run_files.TRAINING / run_files.MODEL)
    wait_for_all()
    engine.close()
    if not is_main:
        processes.end_training()
        return {}

    scores = [f"{policy}/rewards/{reward.name}" for policy in policies for reward in rewards]
    table = pl.concat([samples_table(values, scores) for values in columns.values()], how="diagonal")
    table.write_parquet(output / run_files.SAMPLES)
    found = compare_policies(table, config, policies)
    default_metric = deciding_metric(table, config.accuracy_reward)
    _print_means(found, policies, config.promotion.metric or default_metric)
    processes.end_training()
    return {
        "key": outcomes_key(config, files, state if follows_plan else None),
        "policies": policies,
        "champion": None,
        "accuracy_reward": config.accuracy_reward,
        "deciding_metric": default_metric,
        "temperature": config.evaluation.temperature,
        "num_samples": n,
        "confidence": config.evaluation.confidence,
        "start_seconds": round(start_seconds, 3),
        "sets": found,
    }


def _print_means(found: Mapping[str, Mapping[str, Any]], policies: Sequence[str], metric: str) -> None:
    """Print the metric's mean of each policy, one line per set."""
    unit = ".1%" if evaluated_metric(metric).is_share else ".3f"
    for name, of_set in found.items():
        means = [f"{policy} {of_set['policies'][policy][metric]['mean']:{unit}}" for policy in policies]
        print(f"{metric} on {name}: {', '.join(means)}", flush=True)


def outcomes_key(config: RunConfig, files: Mapping[str, Path], state: TrainerState | None = None) -> str:
    """Hash of everything except the policy that outcomes follow from: two policies' recorded outcomes may be paired if
    it is the same. The seed is not part of it: prompts are the unit, whichever completions are drawn of them. `files`:
    the prompts of each set; `state`: the place in the training, if a reward reads it."""
    sampling = config.evaluation.model_dump(include={"num_samples", "temperature", "top_p", "top_k"})
    parts: list[Any] = [sampling, config.evaluation_length, reward_parts(config), config.accuracy_reward]
    optional = (
        *(environment_parts(config), config.data.chat_template_kwargs, config.rollout.stop),
        config.source_rules,
        state and vars(state),
    )
    parts += [held for held in optional if held]
    digest = hashlib.blake2b(json.dumps(parts, sort_keys=True).encode(), digest_size=16)
    for name, path in sorted(files.items()):
        digest.update(name.encode() + hashlib.blake2b(path.read_bytes()).digest())
    return digest.hexdigest()


def _incompatible_part(base: Any, folder: Path, tokenizer: Any) -> str:
    """Part of the policy in `folder` that keeps the base's engine from sampling from it; "" if there is none."""
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

    from grpo_core.model.pretrained import from_config, from_pretrained

    with torch.device("meta"):  # the weights of another architecture are not even read
        model = from_config(AutoModelForCausalLM, from_pretrained(AutoConfig, folder))
    shapes = [{name: weights.shape for name, weights in each.named_parameters()} for each in (base, model)]
    if shapes[0] != shapes[1]:
        return "architecture"
    own = from_pretrained(AutoTokenizer, folder)
    same = (own.get_vocab(), own.chat_template) == (tokenizer.get_vocab(), tokenizer.chat_template)
    return "" if same else "tokenizer"
