"""Evaluate base, champion, the policy after a warm start and the trained one on the same prompts, set by set, each
prompt once."""

from __future__ import annotations

import functools
import hashlib
import json
import operator
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import polars as pl

from grpo_core import run_files
from grpo_core.config.evaluation import WARM_START
from grpo_core.config.files import load_config
from grpo_core.config.metrics import evaluated_metric
from grpo_core.config.run import RunConfig
from grpo_core.evaluation.samples import Columns, answers_of, prompt_columns, samples_table
from grpo_core.fingerprint import environment_parts, reward_parts
from grpo_core.planning.plan import load_plan
from grpo_core.rewards.trl_arguments import TrainerState
from grpo_core.system.processes import importing

if TYPE_CHECKING:
    from grpo_core.rollout.collect import Scoring


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
        from grpo_core.distributed import wait_for_all
        from grpo_core.evaluation.comparison import compare_policies
        from grpo_core.evaluation.outcomes import deciding_metric
        from grpo_core.evaluation.sampling import answers_of_base, answers_of_model, load_sampling

    config = load_config(run / run_files.CONFIG)
    files = {name: run_files.prompts(run, file) for name, file in config.evaluation_files.items()}
    plan = load_plan(run / run_files.PLAN)
    state = TrainerState.after(plan.max_steps, plan)
    session = load_sampling(config, files, config.evaluation_length, state)
    config, processes, rewards = session.config, session.processes, session.scoring.rewards
    follows_plan = any(reward.reads_state for reward in rewards)
    if follows_plan:  # the earlier rewards are of another training's end
        earlier = None
    taken = [policy for policy in ("base", "champion") if earlier and policy in known]
    if champion and "champion" not in taken and (part := _incompatible_part(session.base, champion, session.scoring)):
        if processes.is_main_process:
            print(f"the champion is left out: it has another {part} than {config.model.name_or_path}", flush=True)
        champion = None
    prompts = {
        name: prompt_columns(name, of_set.rows, config, pictured=of_set.images is not None)
        for name, of_set in session.sets.items()
    }
    start_seconds = time.monotonic() - begun

    answers: dict[str, Columns] = {}
    folders = {"base": None, "champion": champion, "trained": run / run_files.TRAINING / run_files.MODEL}
    if config.warm_start.is_used:
        trained = folders.pop("trained")
        folders |= {WARM_START: run / run_files.WARM_START / run_files.MODEL, "trained": trained}
    for policy, folder in folders.items():
        if earlier and policy in taken:
            answers[policy] = answers_of(policy, earlier, prompts)
        elif policy == "base":
            answers[policy] = answers_of_base(session)
        elif folder is not None:
            answers[policy] = answers_of_model(session, policy, folder)
    wait_for_all()
    session.engine.close()
    if not processes.is_main_process:
        processes.end_training()
        return {}

    policies = [*answers]
    scores = [f"{policy}/rewards/{reward.name}" for policy in policies for reward in rewards]
    columns = [functools.reduce(operator.or_, (of[name] for of in (prompts, *answers.values()))) for name in prompts]
    table = pl.concat([samples_table(of_set, scores) for of_set in columns], how="diagonal")
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
        "num_samples": config.evaluation.num_samples,
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
    it is the same. Neither is the seed part of it, since prompts are the unit, whichever completions are drawn of them,
    nor are the rewards' weights, which are applied to outcomes. `files`: the prompts of each set; `state`: the place in
    the training, if a reward reads it."""
    sampling = config.evaluation.model_dump(include={"num_samples", "temperature", "top_p", "top_k"})
    rewards = [{key: value for key, value in part.items() if key != "weight"} for part in reward_parts(config)]
    parts: list[Any] = [sampling, config.evaluation_length, rewards, config.accuracy_reward]
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


def _incompatible_part(base: Any, folder: Path, scoring: Scoring) -> str:
    """Part of the policy in `folder` that keeps the base's engine from sampling from it; "" if there is none."""
    from transformers import AutoConfig, AutoTokenizer

    from grpo_core.model.pretrained import from_pretrained, without_weights

    model = without_weights(from_pretrained(AutoConfig, folder))  # those of another architecture are not even read
    shapes = [{name: weights.shape for name, weights in each.named_parameters()} for each in (base, model)]
    if shapes[0] != shapes[1]:
        return "architecture"
    own = from_pretrained(AutoTokenizer, folder)
    tokenizer = scoring.tokenizer
    same = (own.get_vocab(), own.chat_template) == (tokenizer.get_vocab(), tokenizer.chat_template)
    return "" if same else "tokenizer"
