"""Base, champion and trained policy on the same prompts, set by set, each prompt once; what the report rests on."""

from __future__ import annotations

import hashlib
import json
import time
from collections.abc import Mapping
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import polars as pl

from grpo_core.config.files import load_config
from grpo_core.config.metrics import evaluated_metric
from grpo_core.config.run import RunConfig
from grpo_core.evaluation.samples import answer_columns, prompt_columns, samples_table
from grpo_core.fingerprint import environment_parts, reward_parts
from grpo_core.system.processes import importing
from grpo_core.system.progress import expect

if TYPE_CHECKING:
    from grpo_core.data.prompts import Prompts
    from grpo_core.rollout.collect import Sample


def evaluate(run: Path, output: Path, champion: Path | None = None) -> dict[str, Any]:
    """Report of all policies. Writes samples.parquet (one row per completion) under `output`.

    Several processes hold each policy as train.sharding says, and each samples its share of the prompts; the report is
    the main one's, the others' is empty.

    A champion with another architecture or tokenizer than the run's base model is left out: the engine cannot sample
    from it. The caller, which knows what the folder is, fills in "champion" of the report.
    """
    begun = time.monotonic()
    with importing():
        import torch

        from grpo_core.data.prompts import load_prompts, load_tokenizer
        from grpo_core.distributed import share, start_processes, wait_for_all
        from grpo_core.environments.setting import make_setting
        from grpo_core.evaluation.comparison import compare_policies
        from grpo_core.evaluation.outcomes import deciding_metric
        from grpo_core.model.capabilities import check_padding
        from grpo_core.model.divergence import mean_kl
        from grpo_core.model.loading import load_model, load_start
        from grpo_core.model.parallelize import sharding
        from grpo_core.model.positions import check_context
        from grpo_core.model.precision import in_float32, on_device
        from grpo_core.model.sharded import is_sharded
        from grpo_core.rewards.contract import rewards_of
        from grpo_core.rollout.collect import sample_and_score, share_samples
        from grpo_core.rollout.factory import make_engine
        from grpo_core.rollout.requests import evaluation_request, evaluation_sampling
        from grpo_core.rollout.waiting import longest_wait, phase_limits

    config = load_config(run / "config.toml")
    expect(config.train.hang_timeout, phase_limits(config))
    processes = start_processes(longest_wait(config))
    device, is_main = processes.device, processes.is_main_process
    config = on_device(config, device).model_copy(update={"rollout": config.rollout.in_evaluation})
    shard = sharding(config.train, frozen=True) if processes.num_processes > 1 else None
    tokenizer = load_tokenizer(config.model)
    files = {name: run / "dataset" / f"{file}.parquet" for name, file in config.evaluation_files.items()}
    setting = make_setting(config, tokenizer)
    encode = setting.encode if setting else None
    options = config.data.chat_template_kwargs
    sets = {name: load_prompts(path, tokenizer, options, encode) for name, path in files.items()}
    rewards = rewards_of(config)
    sampling, n = evaluation_sampling(config), config.evaluation.num_samples

    dtype = torch.bfloat16 if config.train.mixed_precision == "bf16" else torch.float32

    base = load_start(config.model, dtype=dtype, device=device, shard=shard)
    max_length = max(prompts.max_length for prompts in sets.values()) + config.evaluation_length
    check_context(base.config, max_length)
    with nullcontext() if is_sharded(base) else in_float32(base):
        check_padding(base, max_length)
    engine = make_engine(config, config.model.name_or_path, base, tokenizer, max_length)
    columns = {name: prompt_columns(name, prompts.rows, config) for name, prompts in sets.items()}
    policies: list[str] = []

    def sample_share(prompts: Prompts) -> tuple[list[Sample], float]:
        rows = share(len(prompts.ids))
        requests = [evaluation_request(config, prompts, row, n) for row in rows]
        return sample_and_score(engine, requests, rows, sampling, prompts, tokenizer, rewards, setting)

    def sample(policy: str, model: Any) -> None:
        policies.append(policy)
        for name, prompts in sets.items():
            if is_main:
                print(f"evaluating the {policy} policy on {len(prompts.ids)} prompts ({name})", flush=True)
            samples, *_ = share_samples(partial(sample_share, prompts))
            columns[name] |= answer_columns(policy, samples, rewards)
            if model is not base:
                asked = [sample.prompt_ids for sample in samples]
                completed = [sample.completion.ids for sample in samples]
                masks = [sample.completion.mask for sample in samples]
                columns[name][f"{policy}/kl"] = mean_kl(model, base, asked, completed, masks)

    if config.model.adapter:  # which the engine has not loaded
        engine.sync_weights(base)
    start_seconds = time.monotonic() - begun
    sample("base", base)
    if champion is not None:
        if unlike := _unlike(base, champion, tokenizer):
            if is_main:
                print(f"the champion is left out: it has another {unlike} than {config.model.name_or_path}", flush=True)
        else:
            model = load_model(champion, dtype=dtype, device=device, shard=shard)
            engine.sync_weights(model)
            sample("champion", model)
            del model  # one beside the base is enough
    trained = load_model(run / "training" / "model", dtype=dtype, device=device, shard=shard)
    engine.sync_weights(trained)
    sample("trained", trained)
    wait_for_all()
    engine.close()
    if not is_main:
        processes.end_training()
        return {}

    scores = [f"{policy}/rewards/{reward.name}" for policy in policies for reward in rewards]
    table = pl.concat([samples_table(values, scores) for values in columns.values()], how="diagonal")
    table.write_parquet(output / "samples.parquet")
    found = compare_policies(table, config, policies)
    default_metric = deciding_metric(table, config.accuracy_reward)
    metric = config.promotion.metric or default_metric
    unit = ".1%" if evaluated_metric(metric).is_share else ".3f"
    for name, of_set in found.items():
        means = [f"{policy} {of_set['policies'][policy][metric]['mean']:{unit}}" for policy in policies]
        print(f"{metric} on {name}: {', '.join(means)}", flush=True)
    processes.end_training()
    return {
        "key": outcomes_key(config, files),
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


def outcomes_key(config: RunConfig, files: Mapping[str, Path]) -> str:
    """Hash of all that outcomes follow from beside the policy: two policies' recorded outcomes may be paired where it
    is the same. `files`: the prompts of each set."""
    sampling = config.evaluation.model_dump(include={"num_samples", "temperature", "top_p", "top_k"})
    parts: list[Any] = [sampling, config.evaluation_length, reward_parts(config), config.accuracy_reward, config.seed]
    optional = (
        *(environment_parts(config), config.data.chat_template_kwargs, config.rollout.stop),
        config.source_rules,
    )
    parts += [held for held in optional if held]
    digest = hashlib.blake2b(json.dumps(parts, sort_keys=True).encode(), digest_size=16)
    for name, path in sorted(files.items()):
        digest.update(name.encode() + hashlib.blake2b(path.read_bytes()).digest())
    return digest.hexdigest()


def _unlike(base: Any, folder: Path, tokenizer: Any) -> str:
    """Part of the policy in `folder` that keeps the base's engine from sampling from it; "" if there is none."""
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

    with torch.device("meta"):  # the weights of another architecture are not even read
        model = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(folder))
    shapes = [{name: weights.shape for name, weights in each.named_parameters()} for each in (base, model)]
    if shapes[0] != shapes[1]:
        return "architecture"
    own: Any = AutoTokenizer.from_pretrained(folder)
    same = (own.get_vocab(), own.chat_template) == (tokenizer.get_vocab(), tokenizer.chat_template)
    return "" if same else "tokenizer"
