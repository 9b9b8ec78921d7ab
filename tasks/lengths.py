"""How long prompts are in tokens, without tokenizing a million: only those that may be too long, and a sample."""

from __future__ import annotations

from typing import Any

import polars as pl

from grpo_core.config import ModelConfig
from grpo_core.context import usable_positions
from grpo_core.data import encode_prompts, load_tokenizer, without_gaps
from grpo_core.errors import GrpoError

SAMPLED = 10_000  # prompts whose lengths stand for all
LONGEST = 100  # prompts, by bytes, that are always among them
# A byte-level or byte-fallback tokenizer makes at most one token of a byte; a Unicode normalisation before it makes
# at most 11 bytes of one (NFKC; unicode.org/faq/normalization.html).
GROWTH = 11
UNKNOWN = 2**20  # bytes
BEGINNING = 4  # characters of a text that are looked at first for a token
SPECIAL_TOKENS = 16  # more than any tokenizer puts around a text


class ModelError(GrpoError):
    """A model whose tokenizer or configuration cannot be read, or that cannot take the prompts."""


def load_tokenizer_and_context(config: ModelConfig) -> tuple[Any, int | None]:
    """The tokenizer, and the most tokens that a sequence may have (None: no such limit)."""
    from transformers import AutoConfig, logging

    logging.set_verbosity_error()  # it warns of each text that is longer than the model's context
    try:
        tokenizer = load_tokenizer(config)
        model = AutoConfig.from_pretrained(config.name_or_path, revision=config.revision)
    except Exception as error:
        raise ModelError(
            f"model.name_or_path = {config.name_or_path!r}: its tokenizer and config cannot be loaded: {error}"
        ) from error
    return tokenizer, usable_positions(model)


def renders(conversations: pl.Series, tokenizer: Any) -> pl.Series:
    """Which conversations the chat template accepts, tried once for each order of roles."""
    orders = conversations.list.eval(pl.element().struct.field("role")).list.join(",")
    first = pl.DataFrame({"order": orders, "conversation": conversations}).unique("order", keep="first")
    accepted = {order: _is_rendered(conversation, tokenizer) for order, conversation in first.iter_rows()}
    return orders.replace_strict(accepted, return_dtype=pl.Boolean)


def _is_rendered(conversation: list[dict[str, Any]], tokenizer: Any) -> bool:
    try:
        tokenizer.apply_chat_template(without_gaps(conversation), add_generation_prompt=True, tokenize=False)
    except Exception:  # a template is a program, and may raise anything
        return False
    return True


def has_tokens(texts: pl.Series, tokenizer: Any) -> pl.Series:
    """Whether the tokenizer makes a token of each text, special tokens aside. Few beginnings are
    shared by many texts and tokenized first; only a text whose beginning makes no token is tokenized whole."""
    beginnings = texts.str.head(BEGINNING)
    known = beginnings.unique()
    found = dict(zip(known, _are_tokenized(known, tokenizer), strict=True))
    has = beginnings.replace_strict(found, return_dtype=pl.Boolean)
    unsure = (~has).arg_true()
    return has if unsure.is_empty() else has.scatter(unsure, _are_tokenized(texts.gather(unsure), tokenizer))


def _are_tokenized(texts: pl.Series, tokenizer: Any) -> list[bool]:
    return [bool(ids) for ids in tokenizer(texts.to_list(), add_special_tokens=False)["input_ids"]]


def fit(prompts: pl.Series, tokenizer: Any, room: int | None) -> pl.Series:
    """Which prompts take at most `room` tokens; the template accepts all of them."""
    fits = pl.repeat(True, len(prompts), eager=True)
    if room is None:
        return fits
    suspicious = (_most_tokens(prompts, tokenizer) > room).arg_true()
    if suspicious.is_empty():
        return fits
    lengths = token_lengths(prompts.gather(suspicious), tokenizer)
    return fits.scatter(suspicious, lengths <= room)


def token_lengths(prompts: pl.Series, tokenizer: Any) -> pl.Series:
    """Tokens of each prompt, the chat template's included; ModelError with the prompt that the template fails on."""
    try:
        encoded = encode_prompts(prompts.to_list(), tokenizer)
    except Exception as error:
        failing = next((p for p in prompts.to_list() if not _is_rendered(p, tokenizer)), None)
        raise ModelError(f"the chat template fails on a prompt: {error}; the prompt: {failing}") from error
    return pl.Series([len(ids) for ids in encoded], dtype=pl.Int64)


def sample_lengths(prompts: pl.Series, tokenizer: Any) -> pl.Series:
    """Tokens of the longest prompts and of a random sample of the others, or of all if they are few."""
    if len(prompts) > SAMPLED:
        longest = _most_tokens(prompts, tokenizer).arg_sort(descending=True).head(LONGEST)
        others = pl.int_range(len(prompts), eager=True).sample(SAMPLED - LONGEST, seed=0)
        prompts = prompts.gather(pl.concat([longest.cast(pl.Int64), others]).unique())
    return token_lengths(prompts, tokenizer)


def _most_tokens(prompts: pl.Series, tokenizer: Any) -> pl.Series:
    """An upper bound of each prompt's tokens, from its bytes."""
    growth = 1 if tokenizer.is_fast and tokenizer.backend_tokenizer.normalizer is None else GROWTH
    if prompts.dtype == pl.String:
        return prompts.str.len_bytes() * growth + SPECIAL_TOKENS
    message = pl.element().struct
    content = prompts.list.eval(message.field("content").str.len_bytes()).list.sum()
    roles = prompts.list.eval(message.field("role"))
    overhead = {order: _overhead(order, tokenizer) for order in _orders(roles)}
    # Twice, for templates that add text for some contents only.
    return 2 * (content + roles.list.join(",").replace_strict(overhead, return_dtype=pl.UInt32)) * growth


def _orders(roles: pl.Series) -> list[str]:
    return roles.list.join(",").unique().to_list()


def _overhead(order: str, tokenizer: Any) -> int:
    """Bytes that the chat template adds to messages of these roles."""
    messages = [{"role": role, "content": "x"} for role in order.split(",")]
    try:
        return len(tokenizer.apply_chat_template(messages, add_generation_prompt=True, tokenize=False).encode())
    except Exception:  # the template wants other fields too: then such prompts are tokenized
        return UNKNOWN
