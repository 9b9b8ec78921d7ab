"""The data contract: the requirements of the configuration and its rewards on the prompts, as a pandera schema over
Arrow columns.

There are two kinds of rules. The shape (columns and their types) is checked first; if it is wrong, nothing else is
checked. The rules about rows are those of `DataChecks`, each with a severity; every row that breaks one is reported.
"""

from __future__ import annotations

import typing
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import pandera.polars as pa
import polars as pl

from grpo_core.config.environment import EnvironmentConfig
from grpo_core.data.chat import ROLES, begin_token_problem, end_token_problem
from grpo_core.rewards.contract import Reward
from tasks.data import column_fixes
from tasks.data.column_fixes import accepts
from tasks.data.images.columns import NAMES, column_of
from tasks.data.lengths import (
    Options,
    OptionsByEnvironment,
    by_environment,
    fit,
    has_tokens,
    may_fit,
    renders,
    tool_calls,
)
from tasks.data.own_schema import RULE
from tasks.data.path_or_hub import data_set
from tasks.data.repeats import NONE, SHOWN, among, duplicates, firsts, is_conversation, keys_of, prompt_text, shown
from tasks.data.rows import Rows
from tasks.data.sources import is_unstorable, unlike_columns

# U+FFFD; control characters except tab and line ends; two bytes of UTF-8 shown as two characters of Latin-1 or
# Windows-1252 (é as "Ã©", ’ as "â€™").
WRONGLY_DECODED = r"[\x{FFFD}\x00-\x08\x0B\x0C\x0E-\x1F]|Ã[\x{80}-\x{BF}]|Â[\x{80}-\x{BF}]|â€"
VISIBLE = r"[^\s\x{200B}-\x{200D}\x{2060}\x{FEFF}]"  # neither white space nor zero-width
# Messages, or parts of one, written as JSON or by Python's repr.
WRITTEN_DOWN = r"""^\s*(\[\s*)?\{[^{}]*["'](role|content|type)["']\s*:"""
RULES = {
    "blank_prompt": "is not blank",
    "malformed_conversation": (
        f"is messages with text, of {', '.join(ROLES)}; system only first, user or tool last; a place for each image"
    ),
    "chat_template": "is accepted by the model's chat template, which writes all that system, user and tools say",
    "no_tokens": "has a token in the model's vocabulary",
    "broken_image": "can be opened, and read by the model",
    "too_many_images": "has at most data.max_images images",
    "missing_value": "is neither null nor blank",
    "long_prompt": "leaves room for the completion in the model's context",
    "duplicate_prompt": "does not come twice",
    "overlap": "is not both trained on and evaluated on",
    "near_overlap": "is not, apart from case and white space, both trained on and evaluated on",
    "encoding": "was decoded rightly",
    RULE: "keeps the rules of data.schema",
}
UNSTORABLE = "has integers beyond 64 bits, or objects without fields, which cannot be stored: write them as text"


@dataclass(frozen=True)
class Part:
    """Rows from one place, and the requirements on them."""

    rows: Rows
    rewards: list[Reward] = field(default_factory=list)  # those that score the rows' completions
    room: int | None = None  # longest allowed prompt, in tokens
    columns: Mapping[str, str] = field(default_factory=dict)  # how each made column was made
    section: str = "data"  # section of the configuration that defines these columns
    own: Sequence[str] = ()  # columns of the data set itself
    shown: Sequence[str] = ()  # columns that teacher.template shows

    @property
    def needed(self) -> dict[str, dict[str, Any]]:
        """Readers of each column, as `needed_columns` has them, with the template."""
        return needed_columns(self.rewards, self.shown)


def check(
    parts: Mapping[str, Part],
    tokenizer: Any,
    dropped: Collection[str],
    environment: EnvironmentConfig,
    options: OptionsByEnvironment,
    own: pl.DataFrame,
) -> tuple[list[str], pl.DataFrame]:
    """Check the `parts` (train, eval, and eval-NAME of further evaluation sets; see `tasks.data.sources.sources_of`)
    against the contract. `options`: the chat template's; `own`: rows that break rules of your own (FINDING).

    Returns the problems with columns and types, in sentences; without such a problem, every row that breaks a rule
    (FINDING). A prompt is compared only with rows that stay, not with those that break one of the rules `dropped`. With
    an environment, which begins from the whole row, rows are compared instead of prompts.
    """
    rows = {name: part.rows for name, part in parts.items()}
    shape = wrong_columns(parts) or [*_unlike(rows, tokenizer), *unlike_columns(rows)]
    shape = shape or [problem for name, part in parts.items() for problem in _unusable(name, part, environment)]
    if shape:
        return shape, NONE
    known: dict[str, bool] = {}
    whole, out = bool(environment.factories), {*dropped, "blank_prompt", "malformed_conversation"}

    def hold(name: str) -> Iterator[tuple[pl.DataFrame, pl.DataFrame]]:
        """Yield the rows that break a rule, and the keys of those that stay, per slice of a part."""
        part, ours = parts[name], own.filter(dataset=name)
        for first, frame in part.rows.numbered():
            schema = build_schema(frame, part, tokenizer, options, known)
            found = _validate(name, frame, schema, first)
            bad = pl.concat([ours, found]).filter(pl.col("check").is_in(out))["row"]
            yield found, keys_of(frame, first, whole).filter(~pl.col("row").is_in(bad.implode()))

    findings: dict[str, list[pl.DataFrame]] = {name: [] for name in parts}
    keys: dict[str, list[pl.DataFrame]] = {name: [] for name in parts}
    for name in parts:
        for found, staying in hold(name) if data_set(name) != "train" else ():
            findings[name].append(found)
            keys[name].append(staying)
    held_out = {name: pl.concat(own) for name, own in keys.items() if own}
    evals = firsts({name: own for name, own in held_out.items() if data_set(name) == "eval"})
    overlaps = []
    for name in parts:
        for found, staying in hold(name) if data_set(name) == "train" else ():
            findings[name].append(found)
            keys[name].append(staying.select("row", "overlap"))
            overlaps.append(among(name, staying, evals))
            trained = firsts({name: staying})
            overlaps += [among(n, its, trained) for n, its in held_out.items() if data_set(n) != "eval"]
    twice = [
        found
        for kind in dict.fromkeys(map(data_set, parts))
        for found in duplicates(
            {name: rows[name] for name in parts if data_set(name) == kind},
            {name: pl.concat(keys[name]) for name in parts if data_set(name) == kind},
            whole,
        )
    ]
    # Texts that are exactly the same are also the same apart from case and white space.
    shared = pl.concat([NONE, *(found[kind] for kind in ("overlap", "near_overlap") for found in overlaps)])
    shared = shared.unique(["dataset", "row"], keep="first", maintain_order=True).sort("dataset", "row")
    return [], pl.concat([own, *(found for name in parts for found in findings[name]), *twice, shared])


def wrong_columns(parts: Mapping[str, Part]) -> list[str]:
    """Problems with columns and types, in sentences, that need no tokenizer."""
    return [*(problem for name, part in parts.items() for problem in _shape(name, part)), *_unmade(parts)]


def build_schema(
    frame: pl.DataFrame, part: Part, tokenizer: Any, options: OptionsByEnvironment, known: dict[str, bool]
) -> pa.DataFrameSchema:
    """Build the rules about single rows: those about the prompt, and that no value that is read is missing. `known`:
    see `has_tokens`."""
    room = part.room
    # Further problems of a blank or malformed prompt would say nothing new.
    answerable = frame.select(~_is_blank(frame) & _is_well_formed(frame)).to_series()

    def holds(rows: pl.Series, of: Callable[[pl.Series, Options], pl.Series]) -> pl.Series:
        """Result of `of` for the prompts of these rows; true for the others."""
        everywhere = pl.repeat(True, frame.height, eager=True)
        if not rows.any():
            return everywhere
        return everywhere.scatter(rows.arg_true(), by_environment(frame.filter(rows), options, of))

    templated = answerable & is_conversation(frame)
    accepted = holds(templated, lambda p, given: renders(p, tokenizer, given))
    # A huge prompt is not even tokenized.
    short = holds(answerable, lambda p, given: may_fit(p, tokenizer, room, given))
    # Computed here: pandera would report an exception inside a check as a row.
    rules = {
        "blank_prompt": frame.select(~_is_blank(frame)).to_series(),
        "malformed_conversation": frame.select(_is_blank(frame) | _is_well_formed(frame)).to_series(),
        "chat_template": accepted,
        "no_tokens": holds(answerable & short, lambda p, _: has_tokens(_asked(p), tokenizer, known)),
        "long_prompt": short & holds(answerable & accepted & short, lambda p, given: fit(p, tokenizer, room, given)),
        "encoding": ~prompt_text(frame).str.contains(WRONGLY_DECODED).fill_null(False),
    }
    read = part.needed
    missing = [column for column, kinds in read.items() if not all(map(may_be_null, kinds.values()))]
    columns = {
        column: pa.Column(
            nullable=True,
            checks=[
                *([_check("missing_value", is_there(frame, column))] if column in missing else []),
                _check("encoding", _is_utf8(frame, column)),
            ],
        )
        for column in read
    }
    prompt = pa.Column(nullable=True, checks=[_check(name, holds) for name, holds in rules.items()])
    return pa.DataFrameSchema({"prompt": prompt, **columns})


def needed_columns(rewards: list[Reward], shown: Sequence[str] = ()) -> dict[str, dict[str, Any]]:
    """Rewards that read each column, with the type of value that each takes: column → reward → type. `shown`: columns
    that teacher.template shows."""
    needed: dict[str, dict[str, Any]] = {column: {"teacher.template": Any} for column in shown}
    for reward in rewards:
        for column, kind in reward.columns.items():
            needed.setdefault(column, {})[reward.name] = kind
    return needed


def _shape(name: str, part: Part) -> Iterator[str]:
    """Yield the problems of a part's columns, with the key that would solve each."""
    frame, read, made = part.rows.empty, part.needed, (part.columns, part.section)
    if not part.rows.height:
        yield f"{name} has no rows; it needs at least one"
        return
    first = next(part.rows.slices()).head(1)
    if "prompt" not in frame.columns:
        yield f"{name} {column_fixes.missing_column('prompt', '', first, part.columns, read, part.section, part.own)}"
    elif not (frame.schema["prompt"] == pl.String or is_conversation(frame)):
        yield (
            f"{name}, column 'prompt': its type is {_type_name(frame.schema['prompt'])}; a prompt is text, or a list "
            f"of messages {{role: text, content: text}}{column_fixes.wrong_type('prompt', str, frame, *made)}"
        )
    elif is_unstorable(frame.schema["prompt"]):
        yield f"{name}, column 'prompt': a field of the messages {UNSTORABLE}"
    for column, readers in read.items():
        if column in NAMES and column_of(frame.schema):  # a run has all images in one form
            continue
        if column not in frame.columns:
            reading = f", which {', '.join(readers)} reads"
            own = (part.columns, read, part.section, part.own)
            yield f"{name} {column_fixes.missing_column(column, reading, first, *own)}"
            continue
        if is_unstorable(frame.schema[column]):
            yield f"{name}, column {column!r}, which {', '.join(readers)} reads, {UNSTORABLE}"
            continue
        for reader, kind in readers.items():
            if not accepts(kind, frame.schema[column]):
                yield (
                    f"{name}, column {column!r}: its type is {_type_name(frame.schema[column])}; the reward {reader} "
                    f"takes {getattr(kind, '__name__', kind)}{column_fixes.wrong_type(column, kind, frame, *made)}"
                )


def _unmade(parts: Mapping[str, Part]) -> Iterator[str]:
    """Yield columns that cannot be made in any part. For columns that every part needs, see `_shape`."""
    for section in dict.fromkeys(part.section for part in parts.values()):
        own = {name: part for name, part in parts.items() if part.section == section}
        name, first = next(iter(own.items()))
        for column in first.columns.keys() - {"prompt", *first.needed}:
            if not any(column in part.rows.columns for part in own.values()):
                said = column_fixes.missing_column(column, "", first.rows.empty, first.columns, {}, section, first.own)
                yield f"no data set has the parts of {section}.columns.{column}: {name} {said}"


def _unlike(parts: Mapping[str, Rows], tokenizer: Any) -> Iterator[str]:
    """Yield a problem if prompts are of different kinds, or of a kind that the model does not take."""
    kinds = {name: "conversations" if is_conversation(rows.empty) else "text" for name, rows in parts.items()}
    first = next(iter(parts))
    others = {name: kind for name, kind in kinds.items() if kind != kinds[first]}
    for name, kind in others.items():
        yield (
            f"the prompts of {first} are {kinds[first]}, those of {name} {kind}; they have to be the same: "
            'system_prompt = "", in [data] or in that source, makes messages of text'
        )
    if not others and kinds[first] == "conversations" and not tokenizer.chat_template:
        yield (
            f"the prompts are conversations, but the tokenizer {tokenizer.name_or_path!r} has no chat template; use an "
            "instruction-tuned model, or prompts that are text"
        )
    prompts = (prompt for frame in parts[first].slices() for prompt in frame["prompt"].drop_nulls().head(1))
    prompt = None if others else next(prompts, None)
    if prompt is not None and (problem := end_token_problem(tokenizer, prompt[:SHOWN])):
        yield problem
    if kinds[first] == "text" and not others and tokenizer.bos_token:
        begins = pl.col("prompt").str.starts_with(tokenizer.bos_token)
        begun = (it for rows in parts.values() for frame in rows.slices() for it in frame.filter(begins)["prompt"])
        if problem := begin_token_problem(tokenizer, next(begun, "")[:SHOWN]):
            yield problem


def _unusable(name: str, part: Part, environment: EnvironmentConfig) -> Iterator[str]:
    """Yield, for each column, the first value at which a built-in reward would fail during training; and rows with
    which no conversation with the environment or the tools can begin."""
    checks = [
        (reward.name, column, problem_of)
        for reward in part.rewards
        for column, problem_of in reward.value_problems.items()
        if column in reward.columns
    ]
    named = environment.environment_factory if isinstance(environment.environment_factory, dict) else {}
    by_name = bool(named) and part.rows.schema.get("environment") == pl.String
    problems, unknown = {}, []
    for first, frame in part.rows.numbered() if checks or by_name else ():
        for check in checks:
            if check not in problems and (found := _bad_value(name, first, frame, *check)):
                problems[check] = found
        if by_name:
            rows = frame.with_row_index("row", first).filter(~pl.col("environment").is_in([*named]).fill_null(False))
            unknown += [(rows.height, rows["row"].first(), rows["environment"].first())] if rows.height else []
    yield from (problems[check] for check in checks if check in problems)
    if environment.is_used and not is_conversation(part.rows.empty):
        yield (
            f"the prompts of {name} are text; tools and environments need messages, such as "
            '[{"role": "user", "content": …}]: data.system_prompt = "" makes messages of text'
        )
    if named and not by_name:
        yield (
            f"{name} has no text column 'environment', which names the environment of each row: "
            f"{', '.join(named)} (environment.environment_factory)"
        )
    if unknown:
        _, row, value = unknown[0]
        yield (
            f"{name} row {row}, column 'environment': {value!r}, and {sum(it[0] for it in unknown) - 1} more rows "
            f"like it; environment.environment_factory names {', '.join(named)}"
        )


def _bad_value(
    name: str, first: int, frame: pl.DataFrame, reward: str, column: str, problem_of: Callable[[Any], str]
) -> str:
    """Describe the first value that the reward cannot use; "" if there is none."""
    for value in frame[column].drop_nulls().unique(maintain_order=True):
        if problem := problem_of(value):
            row = first + frame[column].eq_missing(value).arg_max()
            return f"{name} row {row}, column {column!r}, which {reward} reads: {problem}"
    return ""


def may_be_null(kind: Any) -> bool:
    return type(None) in typing.get_args(kind)


def _type_name(kind: pl.DataType) -> str:
    names: dict[type[pl.DataType], str] = {pl.String: "text", pl.Boolean: "bool", pl.Null: "null only"}
    return names.get(type(kind), str(kind))


def _check(name: str, holds: pl.Series) -> pa.Check:
    return pa.Check(lambda _: holds.to_frame().lazy(), error=name, ignore_na=False)


def _asked(prompts: pl.Series) -> pl.Series:
    """Text to be answered: the prompt's, or that of its last message."""
    return prompts if prompts.dtype == pl.String else prompts.list.last().struct.field("content")


def _is_blank(frame: pl.DataFrame) -> pl.Expr:
    """True if there is nothing to answer: a blank text, no message, or a last message without text."""
    prompt = pl.col("prompt")
    last = prompt.list.last().struct.field("content") if is_conversation(frame) else prompt
    return ~last.str.contains(VISIBLE).fill_null(False)


def _is_well_formed(frame: pl.DataFrame) -> pl.Expr:
    """True if a conversation keeps the rule `malformed_conversation`, or if a text is not such a conversation written
    as JSON."""
    prompt = pl.col("prompt")
    if not is_conversation(frame):
        return ~prompt.str.contains(WRITTEN_DOWN).fill_null(False)
    message = pl.element().struct
    known = message.field("role").is_in(ROLES).fill_null(False)
    text = ~message.field("content").str.contains(WRITTEN_DOWN)
    text = text.fill_null(tool_calls(frame.schema["prompt"]).is_not_null())  # a message may consist of calls only
    return (
        prompt.list.eval(known & text).list.all()
        & ~prompt.list.slice(1).list.eval(message.field("role") == "system").list.any()
        & prompt.list.last().struct.field("role").is_in(("user", "tool"))
    ).fill_null(False)


def is_there(frame: pl.DataFrame, column: str) -> pl.Series:
    """True for each row with a value in the column that is neither null, blank nor NaN."""
    value = frame[column]
    if value.dtype == pl.String:
        return value.str.contains(r"\S").fill_null(False)
    return value.is_not_nan().fill_null(False) if value.dtype.is_float() else value.is_not_null()


def _is_utf8(frame: pl.DataFrame, column: str) -> pl.Series:
    """True for each row without the character that stands for bytes that are no UTF-8."""
    value = frame[column]
    text = value if value.dtype == pl.String else pl.repeat(None, frame.height, dtype=pl.String, eager=True)
    return ~text.str.contains("\ufffd", literal=True).fill_null(False)


def _validate(name: str, frame: pl.DataFrame, schema: pa.DataFrameSchema, first: int) -> pl.DataFrame:
    """Rows that break a rule, as FINDING, in order. `first`: number of the first row."""
    try:
        schema.validate(frame, lazy=True)
    except pa.errors.SchemaErrors as errors:
        return errors.failure_cases.select(
            dataset=pl.lit(name),
            row=(pl.col("index").cast(pl.UInt32) + first).cast(pl.UInt32),
            column="column",
            check="check",
            value=shown(pl.col("failure_case")),
            other=pl.lit(None, pl.String),
        ).sort("row", maintain_order=True)
    return NONE
