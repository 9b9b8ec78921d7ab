"""What rules a teacher out before any weights are loaded, and where one would help. Imports no torch."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

from tokenizers import Tokenizer

from grpo_core.config.inputs import ModelConfig, quantisation_problem
from grpo_core.config.run import RunConfig
from grpo_core.config.teacher import loaded_teachers, source_teachers, teaches_alone
from grpo_core.errors import ConfigError
from grpo_core.planning.forecast import useful_groups
from grpo_core.planning.shapes import ForecastError, config_file

SHOWN = 3  # ids that differ
OTHER_TOKENIZER = (
    "A teacher judges the policy's token ids: take one with the policy's tokenizer, such as a larger model of its "
    "family"
)


def check_teacher(config: RunConfig, longest: int = 0) -> None:
    """Raises ConfigError if a teacher's weights are quantised, its tokenizer is not the policy's, the policy may
    sample ids that it has no embedding for, or it takes no sequence of `longest` tokens.

    Passes without a teacher, and for what the files on this machine do not say; `check_tokenizers` and the training
    look again. A teacher's server is asked.
    """
    if config.teacher.url is not None:
        _check_server(config, longest)
    if config.teacher.diverges and (rows := _text_values(config.model).get("vocab_size")):
        check_top_k(config, rows)
    for key, teacher in loaded_teachers(config).items():
        _check_loaded(config, f"{key} = {teacher.name_or_path!r}", teacher, longest)


def _check_loaded(config: RunConfig, named: str, teacher: ModelConfig, longest: int) -> None:
    """Do as `check_teacher` for one that the training loads. `named`: its key with its value, for messages."""
    if problem := quantisation_problem(_values(teacher)):
        raise ConfigError(f"{named}: {problem}")
    values = _text_values(teacher)
    rows, own_rows = values.get("vocab_size"), _text_values(config.model).get("vocab_size")
    if rows and own_rows and rows < own_rows:
        raise ConfigError(
            f"{named}: its embedding has {rows:,} rows, and the policy's {own_rows:,}, so that the policy may sample "
            "ids that the teacher does not know; take a teacher with at least as many rows"
        )
    check_positions(config, named, values.get("max_position_embeddings"), longest)
    try:
        vocabularies = [_vocabulary(each) for each in (config.model, teacher)]
    except ForecastError:
        return
    check_tokenizers(config, named, *vocabularies)


def _check_server(config: RunConfig, longest: int) -> None:
    """Do as `check_teacher` for a teacher behind a server."""
    from grpo_core.data.served_teacher import check_served, check_served_tokenizer  # imports httpx2

    check_served(config, longest, _text_values(config.model).get("vocab_size"))
    try:
        own = _tokenizer(config.model)
    except ForecastError:
        return
    ids = own.get_vocab(with_added_tokens=True).values()
    check_served_tokenizer(config, ids, partial(own.decode, skip_special_tokens=False))


def check_positions(config: RunConfig, named: str, positions: int | None, longest: int) -> None:
    """Raises ConfigError if the teacher that is `named` by its key takes fewer than `longest` tokens. `positions`: how
    many it takes; None: no limit, or not known."""
    if positions is not None and longest > positions:
        raise ConfigError(
            f"{named}: it takes {positions:,} tokens, and {config.teacher.read_at_most} has {longest:,}: lower "
            "rollout.max_completion_length, or take a teacher with a longer context (of RoPE of type dynamic or "
            "longrope, the tokens before its frequencies change count)"
        )


def check_top_k(config: RunConfig, vocabulary: int) -> None:
    """Raises ConfigError if no other token is left beside those that the teacher's divergence is computed on.
    `vocabulary`: rows of the policy's output layer."""
    if config.teacher.divergence_top_k >= vocabulary:
        raise ConfigError(
            f"teacher.divergence_top_k = {config.teacher.divergence_top_k:,}: the vocabulary has {vocabulary:,} "
            "tokens; take fewer, or 0 for all"
        )


def check_tokenizers(config: RunConfig, named: str, own: Mapping[str, int], teacher: Mapping[str, int]) -> None:
    """Raises ConfigError unless each id of the policy's tokenizer is the same token in the teacher's, which may have
    more. Both vocabularies: token → id. `named`: the teacher's key with its value, for the message."""
    known = {number: token for token, number in teacher.items()}
    unlike = [(number, token) for token, number in own.items() if known.get(number) != token]
    if not unlike:
        return
    shown = [
        f"{number} is {token!r} and {repr(known[number]) if number in known else 'absent'}"
        for number, token in sorted(unlike)[:SHOWN]
    ]
    raise ConfigError(
        f"{named}: its tokenizer is not that of {config.model.name_or_path!r}: "
        f"{len(unlike):,} of {len(own):,} ids differ ({'; '.join(shown)}{'; …' * (len(unlike) > SHOWN)}). "
        f"{OTHER_TOKENIZER}"
    )


def teacher_notes(config: RunConfig) -> list[str]:
    """A sentence about what teaches whom and how, and one for each teacher that ends its answers otherwise."""
    keys = config.teacher
    if not keys.is_used:
        return []
    by = ", ".join(f"{key} = {it.name_or_path!r}" for key, it in loaded_teachers(config).items())
    if keys.url is not None:
        by = f"the server teacher.url = {keys.url!r}" + (f" with {keys.model!r}" if keys.model else "")
    if keys.update_rate is not None:
        by = f"its own moving average, teacher.update_rate = {keys.update_rate:g}"
    shown = "" if keys.template is None else ", which reads teacher.template"
    how = f"a divergence, divergence_beta = {keys.divergence_beta:g}" if keys.diverges else "each token's advantage"
    beside = "; no reward counts" if teaches_alone(config) else "; the rewards count too"
    alone = [source for source, teacher in source_teachers(config).items() if not teacher]
    untaught = f", and alone in {', '.join(alone)}" if alone else ""
    taught = f"the policy is taught by {by or 'itself'}{shown}: by {how}, weight {keys.weight:g}{beside}{untaught}"
    return [taught, *_end_notes(config)]


def _end_notes(config: RunConfig) -> list[str]:
    """A sentence for each teacher whose end tokens, where both models' files name them, are not the policy's."""
    own, found = _end_tokens(config.model), []
    for key, teacher in loaded_teachers(config).items():
        if own and (ends := _end_tokens(teacher)) and ends != own:
            found.append(
                f"{key} = {teacher.name_or_path!r} ends an answer with {_listed(ends)}, and the policy with "
                f"{_listed(own)}: where the teacher expects another end token, it finds the policy's unlikely, and the "
                "policy may learn not to end; watch completions/clipped_ratio, or take a teacher with the policy's end "
                "token and chat template"
            )
    return found


def _end_tokens(model: ModelConfig) -> dict[int, str]:
    """Id → text of the tokens that end the model's answers, by its generation_config.json or else its config.json;
    empty if the files on this machine do not say."""
    said = _values(model, "generation_config.json").get("eos_token_id", _values(model).get("eos_token_id"))
    try:
        tokenizer = _tokenizer(model)
    except ForecastError:
        return {}
    ids = said if isinstance(said, list) else [said]
    return {it: tokenizer.id_to_token(it) or f"id {it}" for it in sorted(it for it in ids if isinstance(it, int))}


def _listed(tokens: Mapping[int, str]) -> str:
    return " or ".join(repr(text) for text in tokens.values())


def unseen_notes(config: RunConfig) -> list[str]:
    """A sentence for each teacher whose tokenizer is not on this machine."""
    found = []
    for key, teacher in loaded_teachers(config).items():
        try:
            _vocabulary(teacher)
        except ForecastError:
            found.append(
                f"{key} = {teacher.name_or_path!r} is not on this machine: the stage plan will compare its tokenizer"
            )
    return found


def silent_notes(config: RunConfig, pass_rates: Sequence[float]) -> list[str]:
    """A sentence if nothing teaches at all, or one about groups without a signal if the pass rate p is below 1 / (2G),
    where (1 − p)^G, the share of groups that never pass, is above about 0.6. None where a teacher teaches alone."""
    if not (config.teacher.is_used or any(reward.weight for reward in config.rewards)):
        return ["no reward has a weight, and there is no [teacher]: GRPO trains nothing; give a reward a weight"]
    g, taught = config.rollout.num_generations, config.teacher.teaches_silent_groups
    alone = [name for name, teacher in source_teachers(config).items() if not teacher]
    mean = sum(pass_rates) / len(pass_rates) if pass_rates else 1.0
    if mean >= 1 / (2 * g) or (taught and teaches_alone(config)):
        return []
    silent = useful_groups(pass_rates, g).get("silent_share", 1.0)
    helps = (
        "the teacher teaches there" + f", except in {', '.join(alone)}" * bool(alone)
        if taught
        else "a teacher with the same tokenizer ([teacher] model) or a warm start ([warm_start] demonstrations) "
        "teaches there; or take easier prompts, a larger num_generations or a base that solves some"
    )
    if config.warm_start.is_used:
        helps = "that was the base; the warm start teaches there first"
    return [
        f"the pass rate is {mean:.2%}, below 1 / (2·num_generations) = {1 / (2 * g):.2%}: by the rewards, about "
        f"{silent:.0%} of the groups will be silent, all their completions failing alike; {helps}"
    ]


def _values(model: ModelConfig, file: str = "config.json") -> dict[str, Any]:
    """Content of a JSON file of the model; empty if it is not on this machine."""
    try:
        return json.loads(config_file(model.name_or_path, model.revision, file).read_text())
    except (ForecastError, ValueError):
        return {}


def _text_values(model: ModelConfig) -> dict[str, Any]:
    """Content of config.json, of a model that sees too only what is about text; empty if it is not on this machine."""
    values = _values(model)
    return values.get("text_config") or values


def _vocabulary(model: ModelConfig) -> dict[str, int]:
    """Vocabulary of the model's tokenizer.json. Raises ForecastError if there is none on this machine."""
    return _tokenizer(model).get_vocab(with_added_tokens=True)


def _tokenizer(model: ModelConfig) -> Tokenizer:
    file = config_file(model.name_or_path, model.revision, "tokenizer.json")
    try:
        return Tokenizer.from_file(str(file))
    except Exception as error:  # tokenizers raises no other class
        raise ForecastError(f"{file}: {error}") from None
