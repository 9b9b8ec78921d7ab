"""A Hugging Face sequence-classification model as a reward: a reward model's score, or the probability of a label."""

from __future__ import annotations

import functools
import math
import re
from collections.abc import Sequence
from typing import Any

from grpo_core.data.chat import completion_of, is_conversation, text_of, without_gaps
from grpo_core.errors import RewardError
from grpo_core.rewards.builtin.record import BuiltinReward, Rewards

UNBOUNDED = 2**31 - 1  # tokens


def classifier(
    prompts: Sequence[Any],
    completions: Sequence[Any],
    model: str,
    label: str | int | None = None,
    revision: str | None = None,
    with_prompt: bool = True,
    logit: bool = False,
    batch_size: int = 16,
    dtype: str = "auto",
    device: str | None = None,
) -> list[float | None]:
    """The score that a sequence-classification model gives each completion, read after its prompt.

    A model with one output (a reward model) gives that number. A model with several outputs gives the probability of
    `label` (name or number), 0 to 1, or with `logit=True` the number before softmax or sigmoid. Conversations are
    rendered by the model's own chat template; prompts that are text are read together with the completion;
    `with_prompt=False` reads the completion's text alone. A text that is too long for the model loses its beginning.

    `model`: a folder, or a hub name at `revision`. `dtype`: "float32", "bfloat16", "float16", or "auto" for that of the
    saved weights. `device`: default the training's own. Raises RewardError if the model was not trained to classify, or
    lacks the label.

    A special token that a completion spells out is read as a space: it would end the turn, or look like padding.
    """
    import torch

    loaded, tokenizer = _load(model, revision, dtype, device or ("cuda" if torch.cuda.is_available() else "cpu"))
    column = _column(loaded.config, label, model)
    texts = [_without_special_tokens(text_of(completion), tokenizer) for completion in completions]
    templated = with_prompt and is_conversation(prompts[0])
    if templated:
        texts = [_conversation(prompt, text, tokenizer, model) for prompt, text in zip(prompts, texts, strict=True)]
    elif with_prompt:
        texts = [prompt + text for prompt, text in zip(prompts, texts, strict=True)]
    context = getattr(loaded.config.get_text_config(), "max_position_embeddings", UNBOUNDED)
    longest = min(tokenizer.model_max_length, context)
    encoded = tokenizer(texts, add_special_tokens=not templated, truncation=True, max_length=longest)["input_ids"]
    encoded = [ids or [tokenizer.eos_token_id or 0] for ids in encoded]  # a text without tokens would have no score
    order = sorted(range(len(encoded)), key=lambda row: len(encoded[row]))  # similar lengths together: little padding
    scores = torch.empty(len(encoded))
    with torch.inference_mode():
        for start in range(0, len(order), batch_size):
            rows = order[start : start + batch_size]
            logits = _logits(loaded, [encoded[row] for row in rows])
            scores[rows] = _scores(logits, column, loaded.config, logit).cpu()
    return scores.tolist()


@functools.cache
def _load(model: str, revision: str | None, dtype: str, device: str) -> tuple[Any, Any]:
    """The model on its device and its tokenizer, loaded once per process."""
    import torch
    import transformers

    from grpo_core.model.checkpoint_fit import misfit, not_finite
    from grpo_core.model.loading import attention_of
    from grpo_core.model.pretrained import from_pretrained, give_logits_alone

    try:
        # The training's random state must not depend on when this is called first.
        with torch.random.fork_rng(devices=[torch.cuda.current_device()] if torch.cuda.is_available() else []):
            loaded, found = from_pretrained(
                transformers.AutoModelForSequenceClassification,
                model,
                revision,
                dtype=dtype,
                attn_implementation=attention_of(model, revision),
                ignore_mismatched_sizes=True,  # else transformers raises without a name
                output_loading_info=True,
            )
        tokenizer = from_pretrained(transformers.AutoTokenizer, model, revision)
    except (OSError, ValueError) as error:
        raise RewardError(f"model {model!r} cannot be loaded: {error}") from error
    if problem := misfit(loaded, found) or not_finite(loaded):
        raise RewardError(f"model {model!r}: {problem}. Give one that was trained to classify, or as a reward model")
    give_logits_alone(loaded)
    tokenizer.truncation_side = "left"
    return loaded.eval().to(device), tokenizer


def _logits(model: Any, rows: Sequence[list[int]]) -> Any:
    """The model's outputs for texts of n_i tokens, the same as for each text alone. (rows, labels)

    A decoder's output is read at the last token that is not its configuration's pad token, so only that token may pad.
    If the configuration has none, the output is read at the very last token; then rows are padded with a token that
    none of them ends in.
    """
    import torch
    from torch.nn.utils.rnn import pad_sequence

    config = model.config.get_text_config()
    own = config.pad_token_id
    pad = min({*range(len(rows) + 1)} - {row[-1] for row in rows}) if own is None else own
    ids = pad_sequence([torch.tensor(row) for row in rows], batch_first=True, padding_value=pad)  # (rows, max n_i)
    mask = torch.arange(ids.shape[1]) < torch.tensor([[len(row)] for row in rows])
    config.pad_token_id = pad
    try:
        return model(input_ids=ids.to(model.device), attention_mask=mask.long().to(model.device)).logits.float()
    finally:
        config.pad_token_id = own


def _column(config: Any, label: str | int | None, model: str) -> int | None:
    """Index of the label's output; None if the model has one output only."""
    names = [config.id2label[number] for number in range(config.num_labels)]
    if config.num_labels == 1:
        if label is not None:
            raise RewardError(f"model {model!r} has one output, its score, and no label {label!r}; leave label out")
        return None
    if label in names:
        return names.index(label)
    if isinstance(label, int) and 0 <= label < len(names):
        return label
    wanted = "needs a label" if label is None else f"has no label {label!r}"
    raise RewardError(f"model {model!r} {wanted}; it has {', '.join(map(repr, names))}")


def _scores(logits: Any, column: int | None, config: Any, logit: bool) -> Any:
    if column is None:
        return logits[:, 0]
    if logit:
        return logits[:, column]
    several = config.problem_type == "multi_label_classification"
    return (logits.sigmoid() if several else logits.softmax(-1))[:, column]


def _conversation(prompt: Sequence[dict[str, Any]], reply: str, tokenizer: Any, model: str) -> str:
    if tokenizer.chat_template is None:
        raise RewardError(
            f"model {model!r} has no chat template to read a conversation in; set with_prompt = false to have it read "
            "the completion alone, or give prompts as text"
        )
    messages = [*without_gaps(prompt), *completion_of(prompt, reply)]
    return tokenizer.apply_chat_template(messages, tokenize=False)


def _without_special_tokens(text: str, tokenizer: Any) -> str:
    special = [token.content for token in tokenizer.added_tokens_decoder.values() if token.special]
    return re.sub("|".join(map(re.escape, special)), " ", text) if special else text


REWARDS: Rewards = {
    "classifier": BuiltinReward(
        classifier,
        (-math.inf, math.inf),
        operational=frozenset({"batch_size", "device"}),  # except for rounding
        asks_a_model=True,
        model_argument="model",
    ),
}
