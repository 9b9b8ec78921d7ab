"""Lengths of prompts in tokens, without tokenizing a million prompts: only those that may be too long, and a sample."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from typing import Any

import polars as pl

from grpo_core.config.inputs import ModelConfig, quantisation_problem
from grpo_core.config.run import RunConfig
from grpo_core.data.chat import (
    NO_OPTIONS,
    as_written,
    encode_prompts,
    first_unwritten,
    is_conversation,
    turns,
    without_gaps,
)
from grpo_core.data.privileged import STAND_INS, shown_prompt
from grpo_core.data.prompts import load_tokenizer
from grpo_core.errors import GrpoError
from grpo_core.system.processes import importing
from tasks.data.images.tokenizer import ImageTokenizer, texts_between
from tasks.data.rows import Rows

Options = Mapping[str, Any]  # arguments of the chat template beside the messages: variables, and the tools
OptionsByEnvironment = Mapping[str, Options]  # by value of the rows' column `environment`; "": for all rows

SAMPLED = 10_000  # prompts whose lengths represent all
LONGEST = 100  # of these, the longest prompts by bytes
# A byte-level or byte-fallback tokenizer makes at most one token per byte; a Unicode normalisation before it makes
# at most 11 bytes from one (NFKC; unicode.org/faq/normalization.html).
GROWTH = 11
SHRINKAGE = 4  # most bytes that a Unicode normalisation turns into one: 𝐀 becomes A by NFKC
UNKNOWN = 2**20  # bytes
GIANT = 2**20  # bytes from which a prompt is not tokenized if it is too long by BYTES_PER_TOKEN
BYTES_PER_TOKEN = 100  # far more than any tokenizer's mean over a text
KEEPING = {"NFC", "NFD", "NFKC", "NFKD", "Prepend"}  # normalizers that drop no text
SPLITTING = {"ByteLevel", "Split", "Digits", "Metaspace", "Punctuation"}  # pre-tokenizers that drop no text
BEGINNING = 4  # characters of a text that are tokenized first
TOGETHER = 256  # conversations that are rendered in one call
SPECIAL_TOKENS = 16  # more than any tokenizer puts around a text


class ModelError(GrpoError):
    """Raised if a model's tokenizer or configuration cannot be read, or if the model cannot take the prompts."""


def load_tokenizer_and_context(config: ModelConfig, images: bool = False) -> tuple[Any, int | None]:
    """Load the tokenizer; returns it and the largest number of tokens in a sequence (None: no limit). `images`: the
    model is to read images too. Raises ModelError for a model whose saved weights are quantised."""
    with importing():
        from transformers import AutoConfig, logging

        from grpo_core.model.pretrained import from_pretrained, model_class, usable_positions

    logging.set_verbosity_error()  # else it warns of each text that is longer than the model's context
    try:
        tokenizer = load_tokenizer(config)
        model = from_pretrained(AutoConfig, config.name_or_path, config.revision)
    except Exception as error:
        raise ModelError(
            f"model.name_or_path = {config.name_or_path!r}: its tokenizer and config cannot be loaded: {error}"
        ) from error
    model_class(model, f"model.name_or_path = {config.name_or_path!r}", with_images=images)
    if problem := quantisation_problem(model.to_dict()):
        raise ModelError(f"model.name_or_path = {config.name_or_path!r}: {problem}")
    return tokenizer, usable_positions(model)


def embedding_rows(config: ModelConfig) -> int:
    """Number of tokens that the model's embedding has a row for."""
    from transformers import AutoConfig

    from grpo_core.model.pretrained import from_pretrained

    model = from_pretrained(AutoConfig, config.name_or_path, config.revision)
    return model.get_text_config().vocab_size


def beyond(known: int, rows: Rows, tokenizer: Any, options: OptionsByEnvironment) -> int:
    """Count the prompts with a token whose number is not below `known`."""

    def has_unknown(prompts: pl.Series, given: Options) -> pl.Series:
        return pl.Series([max(ids) >= known for ids in encode_prompts(prompts.to_list(), tokenizer, given)])

    return sum(int(by_environment(frame, options, has_unknown).sum()) for frame in rows.slices() if frame.height)


def by_environment(
    frame: pl.DataFrame, options: OptionsByEnvironment, of: Callable[[pl.Series, Options], pl.Series]
) -> pl.Series:
    """Apply `of` to the prompts of each environment with its options; results are in the order of the rows."""
    if "" in options:
        return of(frame["prompt"], options[""])
    places = {name: (frame["environment"] == name).arg_true() for name in options}
    chosen = {name: rows for name, rows in places.items() if not rows.is_empty()}
    found = pl.concat([of(frame["prompt"].gather(rows), options[name]) for name, rows in chosen.items()])
    return found.gather(pl.concat([*chosen.values()]).arg_sort())


def tool_calls(kind: pl.DataType) -> pl.Expr:
    """Tool calls of a message (the element of a list) as JSON; null without any. `kind`: type of the prompts."""
    inner = kind.inner if isinstance(kind, pl.List) else None
    fields = inner.fields if isinstance(inner, pl.Struct) else []
    if not any(field.name == "tool_calls" and isinstance(field.dtype, pl.List) for field in fields):
        return pl.lit(None, pl.String)
    calls = pl.element().struct.field("tool_calls")
    return pl.when(calls.list.len() > 0).then(pl.struct(calls).struct.json_encode())


def renders(conversations: pl.Series, tokenizer: Any, options: Options = NO_OPTIONS) -> pl.Series:
    """True for each conversation that the chat template accepts, and makes a text of that has all of what system, user
    and tools say. Each is tried, since a template may refuse what a message says: many in a call, and one by one where
    that fails."""
    found: list[bool] = []
    for start in range(0, len(conversations), TOGETHER):
        tried = [without_gaps(each) for each in conversations.slice(start, TOGETHER).to_list()]
        try:
            texts = _rendered(tried, tokenizer, options)
            found += [_is_whole(it, text, tokenizer, options) for it, text in zip(tried, texts, strict=True)]
        except Exception:  # a template is a program and may raise anything
            found += [_is_rendered(each, tokenizer, options) for each in tried]
    return pl.Series(found, dtype=pl.Boolean)


def _is_rendered(conversation: list[dict[str, Any]], tokenizer: Any, options: Options) -> bool:
    with suppress(Exception):
        return _is_whole(conversation, _rendered(conversation, tokenizer, options), tokenizer, options)
    return False


def _is_whole(conversation: list[dict[str, Any]], text: str, tokenizer: Any, options: Options) -> bool:
    """True if the text, which the chat template has made of the conversation, has what system, user and tools say."""
    said = (it.get("content") or "" for it in conversation if it["role"] != "assistant")
    asked = (text for content in said for text in texts_between(content))
    if not text or all(as_written(content, text) is not None for content in asked):
        return bool(text)
    return first_unwritten(conversation, lambda it: _rendered(it, tokenizer, options)) is None


def _rendered(messages: Sequence[Any], tokenizer: Any, options: Options) -> Any:
    """Text that the chat template makes of a conversation, or of each of several."""
    return tokenizer.apply_chat_template(messages, add_generation_prompt=True, tokenize=False, **options)


def has_tokens(texts: pl.Series, tokenizer: Any, known: dict[str, bool]) -> pl.Series:
    """True for each text that gives at least one token, special tokens aside. Many texts share few beginnings, so these
    are tokenized first, unless they are `known` from other texts; only a text whose beginning gives no token is
    tokenized completely."""
    beginnings = texts.str.head(BEGINNING)
    new = pl.Series([text for text in beginnings.unique() if text not in known], dtype=pl.String)
    known.update(zip(new, _are_tokenized(new, tokenizer), strict=True))
    has = beginnings.replace_strict(known, return_dtype=pl.Boolean)
    unsure = (~has).arg_true()
    return has if unsure.is_empty() else has.scatter(unsure, _are_tokenized(texts.gather(unsure), tokenizer))


def _are_tokenized(texts: pl.Series, tokenizer: Any) -> list[bool]:
    if texts.is_empty():  # a tokenizer refuses an empty list
        return []
    return [bool(ids) for ids in tokenizer(texts.to_list(), add_special_tokens=False)["input_ids"]]


def may_fit(prompts: pl.Series, tokenizer: Any, room: int | None, options: Options = NO_OPTIONS) -> pl.Series:
    """True for each prompt that may have at most `room` tokens. The others are too long by their bytes, after the chat
    template, and are not tokenized, which might take minutes and gigabytes.

    If every byte ends up in a token, the bound follows from the longest token. Other tokenizers may make one token of
    any text: then a prompt is too long if it has at least GIANT bytes, and more than BYTES_PER_TOKEN per token.
    """
    size = _bytes(prompts)
    fits = pl.repeat(True, len(prompts), eager=True)
    if room is None or prompts.is_empty() or (size <= room).all():
        return fits
    longest = max(len(token.encode()) for token in tokenizer.get_vocab())
    most = room * longest * SHRINKAGE if _keeps_every_byte(tokenizer) else max(GIANT, room * BYTES_PER_TOKEN)
    large = (size > most).arg_true()
    return fits.scatter(large, [_rendered_bytes(it, tokenizer, options) <= most for it in prompts.gather(large)])


def _rendered_bytes(prompt: Any, tokenizer: Any, options: Options) -> int:
    """Bytes of a prompt after the chat template, which may omit messages or parts of them."""
    if not is_conversation(prompt):
        return len(prompt.encode())
    try:
        return len(_rendered(without_gaps(prompt), tokenizer, options).encode())
    except Exception:  # the template refuses it: count its input instead
        return sum(len(text.encode()) for _, text in turns(prompt))


def _keeps_every_byte(tokenizer: Any) -> bool:
    """True if every byte of a text ends up in a token, none dropped and no unknown ones fused: BPE on bytes, or with a
    token for each byte, after steps that are known to drop nothing."""
    if not tokenizer.is_fast:
        return False
    parts = json.loads(tokenizer.backend_tokenizer.to_str())
    normalizers, splitters = _steps(parts["normalizer"], "normalizers"), _steps(parts["pre_tokenizer"], "pretokenizers")
    return (
        parts["model"]["type"] == "BPE"
        and (parts["model"]["byte_fallback"] or "ByteLevel" in (step["type"] for step in splitters))
        and all(step["type"] in KEEPING or _replaces_a_blank(step) for step in normalizers)
        and all(step["type"] in SPLITTING and step.get("behavior") != "Removed" for step in splitters)
        and not any(token["lstrip"] or token["rstrip"] for token in parts["added_tokens"])
    )


def _steps(step: dict[str, Any] | None, several: str) -> list[dict[str, Any]]:
    if step is None:
        return []
    return [each for inner in step[several] for each in _steps(inner, several)] if several in step else [step]


def _replaces_a_blank(step: dict[str, Any]) -> bool:
    return step["type"] == "Replace" and step["pattern"] == {"String": " "} and bool(step["content"])


def fit(prompts: pl.Series, tokenizer: Any, room: int | None, options: Options = NO_OPTIONS) -> pl.Series:
    """True for each prompt that has at most `room` tokens. The template must accept all of them."""
    fits = pl.repeat(True, len(prompts), eager=True)
    if room is None:
        return fits
    suspicious = (_most_tokens(prompts, tokenizer, options) > room).arg_true()
    if suspicious.is_empty():
        return fits
    lengths = token_lengths(prompts.gather(suspicious), tokenizer, options)
    return fits.scatter(suspicious, lengths <= room)


def token_lengths(prompts: pl.Series, tokenizer: Any, options: Options = NO_OPTIONS) -> pl.Series:
    """Tokens per prompt, including the chat template's. Raises ModelError, with the prompt, if the template fails."""
    try:
        encoded = encode_prompts(prompts.to_list(), tokenizer, options)
    except Exception as error:
        shown = (p for p in prompts.to_list() if is_conversation(p))
        failing = next((p for p in shown if not _is_rendered(without_gaps(p), tokenizer, options)), None)
        raise ModelError(f"the chat template fails on a prompt: {error}; the prompt: {failing}") from error
    return pl.Series([len(ids) for ids in encoded], dtype=pl.Int64)


def sample_lengths(rows: Rows, tokenizer: Any, options: OptionsByEnvironment) -> pl.Series:
    """Tokens of the longest prompts and of a random sample of the others; of all prompts if there are few."""

    def bound(frame: pl.DataFrame) -> pl.Series:
        return by_environment(frame, options, lambda prompts, given: _most_tokens(prompts, tokenizer, given))

    chosen = pl.int_range(rows.height, eager=True)
    if rows.height > SAMPLED:
        most = pl.concat(bound(frame) for frame in rows.slices() if frame.height)
        longest = most.arg_sort(descending=True).head(LONGEST)
        others = chosen.sample(SAMPLED - LONGEST, seed=0)
        chosen = pl.concat([longest.cast(pl.Int64), others]).unique()
    names = ["prompt", *(["environment"] if "environment" in rows.columns else [])]
    frame = rows.map(lambda frame: frame.select(names)).gather(chosen)
    return by_environment(frame, options, lambda prompts, given: token_lengths(prompts, tokenizer, given))


def longest_shown(
    rows: Rows, config: RunConfig, tokenizer: Any, options: OptionsByEnvironment, positions: int | None
) -> int:
    """Tokens of the longest prompt that teacher.template makes of these rows, of which completions may be a part.
    Raises ModelError if the policy is its own teacher, and takes too few `positions` to read it."""
    teacher, completion = config.teacher, config.rollout.max_completion_length
    template = teacher.template or ""

    def shown(frame: pl.DataFrame) -> pl.DataFrame:
        prompts = [shown_prompt(template, row, STAND_INS) or row["prompt"] for row in frame.iter_rows(named=True)]
        return frame.with_columns(prompt=pl.Series(prompts, dtype=frame.schema["prompt"]))

    texts = teacher.shown_completions
    longest = max(sample_lengths(rows.map(shown), tokenizer, options)) + texts * completion
    if teacher.is_policy and positions and longest + completion > positions:
        within = f", {texts} · {completion} of them for {{better}} and {{error}}" if texts else ""
        raise ModelError(
            f"teacher.template={template!r}: the longest prompt that it makes may have {longest:,} tokens{within}, and "
            f"a completion {completion:,}; {config.model.name_or_path!r} takes {positions:,} tokens. Show less, or "
            "lower rollout.max_completion_length"
        )
    return longest


def _most_tokens(prompts: pl.Series, tokenizer: Any, options: Options) -> pl.Series:
    """Upper bound of each prompt's tokens, from the bytes of its text and the tokens of its images."""
    growth = 1 if tokenizer.is_fast and tokenizer.backend_tokenizer.normalizer is None else GROWTH
    if prompts.dtype == pl.String:
        return _bytes(prompts) * growth + SPECIAL_TOKENS
    roles = prompts.list.eval(pl.element().struct.field("role")).list.join(",")
    overhead = {order: _overhead(order, tokenizer, options) for order in roles.unique()}
    # Doubled, for templates that add text only for some contents.
    text = 2 * (_bytes(prompts) + roles.replace_strict(overhead, return_dtype=pl.UInt32)) * growth
    return text + tokenizer.most_tokens(prompts) if isinstance(tokenizer, ImageTokenizer) else text


def _bytes(prompts: pl.Series) -> pl.Series:
    """Bytes of each prompt's text, or of its messages' texts and their tool calls as JSON."""
    if prompts.dtype == pl.String:
        return prompts.str.len_bytes()
    texts = (pl.element().struct.field("content"), tool_calls(prompts.dtype))
    return prompts.list.eval(pl.sum_horizontal(text.str.len_bytes().fill_null(0) for text in texts)).list.sum()


def _overhead(order: str, tokenizer: Any, options: Options) -> int:
    """Bytes that the chat template adds to messages of these roles."""
    messages = [{"role": role, "content": "x"} for role in order.split(",")]
    with suppress(Exception):  # the template needs other fields too: then such prompts are tokenized
        return len(_rendered(messages, tokenizer, options).encode())
    return UNKNOWN
