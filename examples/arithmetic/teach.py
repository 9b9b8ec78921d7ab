"""Teaches the quickstart's base model, which lies in `base` beside this file: the quickstart does not run this.

The base is a one-million-parameter Qwen2 trained on the training sums only, and stopped half-taught, so that
reinforcement learning has something left to gain. The stopping point is selected on the held-out sums: its held-out
accuracy says where a run starts, and is not an unbiased measure of the base. Processors that add up in another order
stop elsewhere; so one of them has taught it for all. Weights are kept in float16, half the size.
"""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import TYPE_CHECKING

from examples import tiny
from examples.arithmetic.make import BASE, Row, make_rows
from grpo_core.system.libraries import quiet_libraries
from grpo_core.system.processes import importing, run_and_leave

if TYPE_CHECKING:
    import torch
    from transformers import Qwen2ForCausalLM, Qwen2Tokenizer

PAD, EOS, UNK = "<pad>", "<eos>", "<unk>"
ALPHABET = "0123456789+="
CONTEXT, SIZES = 64, {"intermediate_size": 512, "num_hidden_layers": 4}
TARGET, MAX_STEPS, EVAL_EVERY = 0.42, 800, 10
BATCH, LEARNING_RATE, WARMUP = 128, 2e-3, 20


def make_tokenizer() -> Qwen2Tokenizer:
    """One token a character; like any Qwen2 tokenizer it drops what its vocabulary lacks.

    AutoTokenizer reads any tokenizer beside a Qwen2 model as this class, and would replace another's pre-tokenizer.
    """
    from transformers import Qwen2Tokenizer

    vocab = {token: i for i, token in enumerate([PAD, EOS, UNK, *ALPHABET])}
    special = {"pad_token": PAD, "eos_token": EOS, "unk_token": UNK}
    return Qwen2Tokenizer(vocab=vocab, merges=[], **special, model_max_length=CONTEXT, padding_side="left")


def encode(rows: list[Row], tokenizer: Qwen2Tokenizer) -> tuple[torch.Tensor, torch.Tensor]:
    """Token ids and labels of the sums with their answers, as `tiny.encode` makes them."""
    return tiny.encode([(row["prompt"], row["answer"]) for row in rows], tokenizer)


def greedy_accuracy(model: Qwen2ForCausalLM, inputs: torch.Tensor, labels: torch.Tensor) -> float:
    """Share of right answers, from one forward pass with nothing generated: greedy decoding gives the right answer just
    when every token of it is the likeliest after those before it."""
    import torch

    with torch.no_grad():
        logits = model(input_ids=inputs, use_cache=False).logits[:, :-1]
    targets = labels[:, 1:]
    return ((logits.argmax(-1) == targets) | (targets == -100)).all(1).float().mean().item()


def train_base(train: list[Row], held: list[Row]) -> tuple[Qwen2ForCausalLM, Qwen2Tokenizer]:
    import torch

    torch.manual_seed(tiny.SEED)
    tokenizer = make_tokenizer()
    model = tiny.make_model(tokenizer, CONTEXT, **SIZES)
    inputs, labels = encode(train, tokenizer)
    held_inputs, held_labels = encode(held, tokenizer)
    optimizer = torch.optim.AdamW(model.parameters(), lr=LEARNING_RATE, betas=(0.9, 0.95), weight_decay=0.0)
    warmup = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: min(1.0, (step + 1) / WARMUP))
    for step in range(1, MAX_STEPS + 1):
        batch = torch.randint(len(inputs), (BATCH,))
        logits = model(input_ids=inputs[batch], use_cache=False).logits[:, :-1]
        loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1), labels[batch][:, 1:].flatten())
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        warmup.step()
        if step % EVAL_EVERY == 0:
            accuracy = greedy_accuracy(model, held_inputs, held_labels)
            print(f"step {step:3d}  loss {loss.item():.3f}  held-out accuracy {accuracy:5.1%}", flush=True)
            if accuracy >= TARGET:
                return model, tokenizer
    raise SystemExit(f"the base did not reach {TARGET:.0%} in {MAX_STEPS} steps")


def write(model: Qwen2ForCausalLM, tokenizer: Qwen2Tokenizer, folder: Path) -> None:
    """Write a model whose configuration says float32, as it is trained, with weights in float16."""
    from safetensors.torch import save_file

    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    weights = {name: weight.half() for name, weight in model.state_dict().items()}
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})


def main() -> None:
    quiet_libraries()
    with importing():
        import torch
        from transformers import GenerationConfig, Qwen2Config, Qwen2ForCausalLM, Qwen2Tokenizer  # noqa: F401

    torch.set_num_threads(2)  # a model this small has no use for more
    model, tokenizer = train_base(*make_rows())
    with tempfile.TemporaryDirectory(prefix=".base-", dir=BASE.parent) as scratch:
        write(model, tokenizer, Path(scratch, "new"))
        BASE.rename(Path(scratch, "old"))
        Path(scratch, "new").rename(BASE)


if __name__ == "__main__":
    run_and_leave(main)
