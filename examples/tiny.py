"""Shared by the recipes' examples: teaches a language model of half a million parameters a task by half, and replaces
an output folder only when the new one is complete.

The base of a recipe's small form learns from demonstrations of mixed quality, between which a run's reward
distinguishes: what the base does now and then, reinforcement learning can make a habit.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from grpo_core.system.libraries import quiet_libraries

if TYPE_CHECKING:
    import torch
    from transformers import PreTrainedModel, Qwen2ForCausalLM, Qwen2Tokenizer

Message = dict[str, Any]
Prompt = str | list[Message]  # text, or a conversation
Demonstration = tuple[Prompt, str | list[Message]]  # a prompt and the answer: text, or the turns that follow

SEED = 0
PAD, START, END = "<|endoftext|>", "<|im_start|>", "<|im_end|>"  # as Qwen2's
CHAT_TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n{{ message['content'] }}"
    "{% for call in message['tool_calls'] or [] %}<tool_call>\n"
    "{\"name\": \"{{ call['function']['name'] }}\", \"arguments\": {{ call['function']['arguments'] | tojson }}}"
    "\n</tool_call>{% endfor %}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
BATCH, LEARNING_RATE, WARM_UP, SHOWN_EVERY = 32, 2e-3, 20, 50


def call(tool: str, **arguments: Any) -> Message:
    """Make a turn that calls a tool, as the chat template writes it."""
    return say(f"<tool_call>\n{json.dumps({'name': tool, 'arguments': arguments})}\n</tool_call>")


def say(text: str) -> Message:
    return {"role": "assistant", "content": text}


def answer(text: str) -> Message:
    """Make the message with a tool's answer."""
    return {"role": "tool", "content": text}


def make_tokenizer(
    demonstrations: Sequence[Demonstration], vocab_size: int = 512, template: str = CHAT_TEMPLATE
) -> Qwen2Tokenizer:
    """Make a byte-level BPE from the demonstrations; it writes any text, and conversations in ChatML."""
    from tokenizers.pre_tokenizers import ByteLevel
    from transformers import Qwen2Tokenizer

    special = [PAD, START, END]
    empty = Qwen2Tokenizer(vocab={token: i for i, token in enumerate(special)}, additional_special_tokens=special)
    roles = ("system", "user", "assistant")
    texts = (text for prompt, said in demonstrations for text in (*roles, *_texts(prompt), *_texts(said)))
    learnt = empty.train_new_from_iterator(
        texts, vocab_size, initial_alphabet=ByteLevel.alphabet(), show_progress=False
    )
    learnt.pad_token, learnt.eos_token, learnt.padding_side = PAD, END, "left"
    learnt.chat_template = template
    return learnt


def make_model(
    tokenizer: Qwen2Tokenizer, context: int, intermediate_size: int = 256, num_hidden_layers: int = 3
) -> Qwen2ForCausalLM:
    """Make a random Qwen2 of some 0.6 million parameters, or of these sizes, that reads up to `context` tokens."""
    from transformers import GenerationConfig, Qwen2Config, Qwen2ForCausalLM

    ids = {"bos_token_id": None, "eos_token_id": tokenizer.eos_token_id, "pad_token_id": tokenizer.pad_token_id}
    config = Qwen2Config(
        vocab_size=len(tokenizer),
        hidden_size=128,
        intermediate_size=intermediate_size,
        num_hidden_layers=num_hidden_layers,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=context,
        tie_word_embeddings=False,  # an engine may keep a packed copy of a tied head; here there is none
        dtype="float32",
        **ids,
    )
    model = Qwen2ForCausalLM(config)
    model.generation_config = GenerationConfig(do_sample=False, **ids)
    return model


def make_base(
    folder: Path,
    demonstrations: Sequence[Demonstration],
    steps: int,
    context: int = 128,
) -> tuple[Qwen2ForCausalLM, Qwen2Tokenizer]:
    """Teach a new model the demonstrations in `steps` batches of BATCH, and save it with its tokenizer in `folder`."""
    import torch

    # Gives the same base on any number of cores; more threads would not speed up so small a model.
    torch.set_num_threads(1)
    torch.manual_seed(SEED)
    tokenizer = make_tokenizer(demonstrations)
    model = make_model(tokenizer, context)
    inputs, labels = encode(demonstrations, tokenizer)
    if inputs.shape[1] > context:
        raise ValueError(f"a demonstration takes {inputs.shape[1]} tokens, more than context={context}")
    teach(model, inputs, labels, steps, tokenizer)
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return model, tokenizer


def teach(
    model: PreTrainedModel,
    inputs: torch.Tensor,
    labels: torch.Tensor,
    steps: int,
    tokenizer: Qwen2Tokenizer,
    seen: Callable[[torch.Tensor, torch.Tensor], dict[str, torch.Tensor]] = lambda rows, ids: {},
) -> None:
    """Train the model on what `encode` returned, in `steps` batches of BATCH. `seen` gives its arguments beside the
    token ids, such as pixels, for the numbers of a batch's rows and their ids."""
    import torch

    optimizer = torch.optim.AdamW(model.parameters(), lr=LEARNING_RATE, betas=(0.9, 0.95), weight_decay=0.0)
    warm_up = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: min(1.0, (step + 1) / WARM_UP))
    started = time.perf_counter()
    for step in range(1, steps + 1):
        batch = torch.randint(len(inputs), (BATCH,))
        used = int((inputs[batch] != tokenizer.pad_token_id).sum(1).max())
        ids = inputs[batch, :used]
        logits = model(input_ids=ids, use_cache=False, **seen(batch, ids)).logits[:, :-1]
        loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1), labels[batch, 1:used].flatten())
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        warm_up.step()
        if step % SHOWN_EVERY == 0 or step == steps:
            print(f"step {step:3d}  loss {loss.item():.3f}", flush=True)
    parameters, seconds = model.num_parameters(), time.perf_counter() - started
    print(f"base: {parameters:,} parameters, {steps} steps in {seconds:.0f} s", flush=True)


def encode(demonstrations: Sequence[Demonstration], tokenizer: Qwen2Tokenizer) -> tuple[torch.Tensor, torch.Tensor]:
    """Return right-padded token ids, and labels with -100 where there is no loss (prompt, tools and padding)."""
    import torch

    inputs, labels = [], []
    for prompt, said in demonstrations:
        ids: list[int] = []
        learnt: list[int] = []
        for text, is_learnt in _pieces(prompt, said, tokenizer):
            new = tokenizer(text)["input_ids"] + [tokenizer.eos_token_id] * is_learnt
            ids += new
            learnt += new if is_learnt else [-100] * len(new)
        inputs.append(ids)
        labels.append(learnt)
    width = max(map(len, inputs))
    padded = [ids + [tokenizer.pad_token_id] * (width - len(ids)) for ids in inputs]
    masked = [ids + [-100] * (width - len(ids)) for ids in labels]
    return torch.tensor(padded), torch.tensor(masked)


def write_rows(folder: Path, train: Sequence[dict[str, Any]], held: Sequence[dict[str, Any]]) -> None:
    """`folder`/train.parquet and eval.parquet."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    for name, rows in (("train", train), ("eval", held)):
        pq.write_table(pa.Table.from_pylist(list(rows)), folder / f"{name}.parquet")


def run(script: str, make: Callable[[Path], None]) -> None:
    """Run the command line of an example: `make` fills an empty folder, which replaces --out once it is complete.

    Does nothing if --out was made by the present version of the script and this module. Exits if --out holds something
    else.
    """
    parser = argparse.ArgumentParser(description="Make a recipe's data and base model.")
    parser.add_argument("--out", type=Path, default=Path("storage", "examples", Path(script).resolve().parent.name))
    out: Path = parser.parse_args().out
    source = hashlib.sha256(Path(script).read_bytes() + Path(__file__).read_bytes()).hexdigest()
    info = out / "info.json"
    made_by = json.loads(info.read_text()).get("source") if info.is_file() else None
    if made_by == source:
        print(f"{out} is up to date")
        return
    if made_by is None and out.exists() and (not out.is_dir() or any(out.iterdir())):
        raise SystemExit(f"{out} holds something this script did not make; choose another --out")
    quiet_libraries()
    out.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=f".{out.name}-", dir=out.parent) as scratch:
        new = Path(scratch, "new")
        new.mkdir()
        make(new)
        (new / "info.json").write_text(json.dumps({"source": source}) + "\n")
        if out.exists():
            out.rename(Path(scratch, "old"))
        new.rename(out)
    print(f"{out}: {', '.join(sorted(path.name for path in out.iterdir()))}")


def _pieces(prompt: Prompt, said: str | list[Message], tokenizer: Qwen2Tokenizer) -> Iterator[tuple[str, bool]]:
    """Yield a demonstration's text in parts, as a conversation joins them; the flag says whether the part is learnt,
    with an end token behind it."""
    if isinstance(prompt, str):
        yield prompt, False
        assert isinstance(said, str)
        yield said, True
        return
    messages, written = [*prompt], ""
    for turn in said if isinstance(said, list) else [say(said)]:
        if turn["role"] == "assistant":
            text = str(tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True))
            yield text.removeprefix(written), False
            yield turn["content"], True
            written = text + turn["content"] + END
        messages.append(turn)


def _texts(said: str | list[Message]) -> list[str]:
    return [said] if isinstance(said, str) else [message["content"] for message in said]
