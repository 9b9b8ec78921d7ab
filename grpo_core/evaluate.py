"""Base, champion and trained policy on the same prompts, set by set, each prompt once; what the report rests on.

Entry point: `python -m grpo_core.evaluate RUN_DIR`.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import math
import sys
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import polars as pl

from grpo_core.config.files import RunConfig, load_config
from grpo_core.fingerprint import reward_parts
from grpo_core.rewards.contract import Reward, RewardError
from grpo_core.system.libraries import quiet_libraries

if TYPE_CHECKING:
    from grpo_core.rollout.collect import Sample


def main() -> None:
    parser = argparse.ArgumentParser(
        prog="grpo_core.evaluate", description="Compare RUN's trained policy with its base, and with a champion."
    )
    parser.add_argument("run", type=Path, help="run directory with config.toml, dataset/ and training/model")
    parser.add_argument("--output", type=Path, help="where to write; default RUN/evaluation")
    parser.add_argument("--champion", type=Path, help="folder of the model to beat, as transformers loads it")
    arguments = parser.parse_args()
    output = arguments.output or arguments.run / "evaluation"
    output.mkdir(parents=True, exist_ok=True)
    quiet_libraries()
    try:
        report = evaluate(arguments.run, output, arguments.champion)
    except RewardError as error:
        sys.exit(str(error))
    (output / "report.json").write_text(json.dumps(report, indent=2) + "\n")


def evaluate(run: Path, output: Path, champion: Path | None = None) -> dict[str, Any]:
    """Report of all policies; writes samples.parquet (a row a completion) under `output`.

    A champion with another architecture or tokenizer than the run's base model is left out: the engine cannot sample
    from it. "champion" in the report is for the caller to fill in, who knows what the folder is.
    """
    import torch

    from grpo_core.data.prompts import load_prompts, load_tokenizer
    from grpo_core.evaluation.comparison import compare_policies
    from grpo_core.evaluation.outcomes import deciding_metric
    from grpo_core.model.divergence import mean_kl
    from grpo_core.model.policy import check_padding, load_model
    from grpo_core.model.positions import check_context
    from grpo_core.model.precision import in_bfloat16
    from grpo_core.rewards.contract import resolve
    from grpo_core.rollout.collect import sample_and_score
    from grpo_core.rollout.types import make_engine
    from grpo_core.training.held_out import evaluation_request, evaluation_sampling

    config = load_config(run / "config.toml")
    device = "cuda" if torch.cuda.is_available() else "cpu"
    tokenizer = load_tokenizer(config.model)
    files = {name: run / "dataset" / f"{file}.parquet" for name, file in config.evaluation_files.items()}
    sets = {name: load_prompts(path, tokenizer) for name, path in files.items()}
    rewards = [resolve(reward) for reward in config.rewards]
    sampling, n = evaluation_sampling(config), config.evaluation.num_samples

    def in_precision(model: Any) -> Any:
        return in_bfloat16(model) if config.train.mixed_precision == "bf16" else model

    base = load_model(config.model.name_or_path, config.model.revision).to(device)
    max_length = max(prompts.max_length for prompts in sets.values()) + config.evaluation_length
    check_context(base.config, max_length)
    check_padding(base, max_length)
    base = in_precision(base)
    engine = make_engine(config, config.model.name_or_path, base, tokenizer, max_length)
    columns = {name: prompt_columns(name, prompts.rows, config) for name, prompts in sets.items()}
    policies: list[str] = []

    def sample(policy: str, model: Any) -> None:
        policies.append(policy)
        for name, prompts in sets.items():
            print(f"evaluating the {policy} policy on {len(prompts.ids)} prompts ({name})", flush=True)
            requests = [evaluation_request(config, row, ids, n) for row, ids in enumerate(prompts.ids)]
            rows = range(len(requests))
            samples, _ = sample_and_score(engine, requests, rows, sampling, prompts, tokenizer, rewards)
            columns[name] |= _answer_columns(policy, samples, rewards)
            if model is not base:
                asked = [prompts.ids[sample.row] for sample in samples]
                completed = [sample.completion.ids for sample in samples]
                columns[name][f"{policy}/kl"] = mean_kl(model, base, asked, completed)

    sample("base", base)
    if champion is not None:
        model = in_precision(load_model(champion).to(device))
        if unlike := _unlike(base, model, tokenizer, champion):
            print(f"the champion is left out: it has another {unlike} than {config.model.name_or_path}", flush=True)
        else:
            engine.sync_weights(model)
            sample("champion", model)
        del model  # one beside the base is enough
    trained = in_precision(load_model(run / "training" / "model").to(device))
    engine.sync_weights(trained)
    sample("trained", trained)
    engine.close()

    scores = [f"{policy}/rewards/{reward.name}" for policy in policies for reward in rewards]
    table = pl.concat([samples_table(values, scores) for values in columns.values()], how="diagonal")
    table.write_parquet(output / "samples.parquet")
    found = compare_policies(table, config, policies)
    default_metric = deciding_metric(table, config.accuracy_reward)
    metric = config.promotion.metric or default_metric
    unit = ".1%" if metric == "accuracy" else ".3f"
    for name, of_set in found.items():
        means = [f"{policy} {of_set['policies'][policy][metric]['mean']:{unit}}" for policy in policies]
        print(f"{metric} on {name}: {', '.join(means)}", flush=True)
    return {
        "key": outcomes_key(config, files),
        "policies": policies,
        "champion": None,
        "accuracy_reward": config.accuracy_reward,
        "deciding_metric": default_metric,
        "temperature": config.evaluation.temperature,
        "num_samples": n,
        "confidence": config.evaluation.confidence,
        "sets": found,
    }


def outcomes_key(config: RunConfig, files: Mapping[str, Path]) -> str:
    """Hash of all that outcomes follow from beside the policy: two policies' recorded outcomes may be paired where it
    is the same. `files`: the prompts of each set."""
    sampling = config.evaluation.model_dump(include={"num_samples", "temperature", "top_p", "top_k"})
    parts = [sampling, config.evaluation_length, reward_parts(config), config.accuracy_reward, config.seed]
    digest = hashlib.blake2b(json.dumps(parts, sort_keys=True).encode(), digest_size=16)
    for name, path in sorted(files.items()):
        digest.update(name.encode() + hashlib.blake2b(path.read_bytes()).digest())
    return digest.hexdigest()


def _unlike(base: Any, model: Any, tokenizer: Any, folder: Path) -> str:
    """What a policy has that keeps the base's engine from sampling from it; "" when nothing does."""
    from transformers import AutoTokenizer

    shapes = ({name: weights.shape for name, weights in each.named_parameters()} for each in (base, model))
    if next(shapes) != next(shapes):
        return "architecture"
    own = AutoTokenizer.from_pretrained(folder)
    same = (own.get_vocab(), own.chat_template) == (tokenizer.get_vocab(), tokenizer.chat_template)
    return "" if same else "tokenizer"


def _answer_columns(policy: str, samples: Sequence[Sample], rewards: Sequence[Reward]) -> dict[str, list[Any]]:
    """The columns of samples.parquet that are a policy's own, but for its KL."""
    columns: dict[str, list[Any]] = {
        f"{policy}/completion": [sample.text for sample in samples],
        f"{policy}/completion_tokens": [len(sample.completion.ids) for sample in samples],
        f"{policy}/truncated": [sample.completion.truncated for sample in samples],
    }
    for k, reward in enumerate(rewards):
        values = [sample.rewards[k] for sample in samples]
        columns[f"{policy}/rewards/{reward.name}"] = [None if math.isnan(value) else value for value in values]
    return columns


def samples_table(columns: Mapping[str, list[Any]], scores: Iterable[str]) -> pl.DataFrame:
    """The samples of one set, with the same types whatever is empty in it; `scores`: the columns of rewards."""
    types: dict[str, Any] = {"answer": pl.String, "category": pl.String, **dict.fromkeys(scores, pl.Float64)}
    return pl.DataFrame(columns, schema_overrides={name: kind for name, kind in types.items() if name in columns})


def prompt_columns(name: str, rows: Sequence[Mapping[str, Any]], config: RunConfig) -> dict[str, list[Any]]:
    """The columns of samples.parquet that are the same for all policies: one entry a sample of a prompt."""
    n = config.evaluation.num_samples
    columns: dict[str, list[Any]] = {"prompt": [_plain(row["prompt"]) for row in rows]}
    for column, source in (("answer", config.data.answer_column), ("category", config.evaluation.category_column)):
        if source in rows[0]:
            columns[column] = [None if row[source] is None else str(row[source]) for row in rows]
    places: dict[str, list[Any]] = {
        "set": [name] * n * len(rows),
        "row": [row for row in range(len(rows)) for _ in range(n)],
        "sample": list(range(n)) * len(rows),
    }
    return places | {column: [value for value in values for _ in range(n)] for column, values in columns.items()}


def _plain(prompt: Any) -> Any:
    """A prompt; of messages the fields that every set has."""
    if isinstance(prompt, str):
        return prompt
    return [{"role": message["role"], "content": message["content"]} for message in prompt]


if __name__ == "__main__":
    main()
