"""Builds the inputs of the GRPO quickstart: two-digit sums (train.parquet, eval.parquet) and a base model to improve.

The base is a one-million-parameter Qwen2 trained on the training sums only, and stopped half-taught, so that
reinforcement learning has something left to gain. The stopping point is selected on the held-out sums: the base's
held-out accuracy (info.json) says where a run starts, and is not an unbiased measure of the base.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import random
import tempfile
import time
from pathlib import Path
from typing import TYPE_CHECKING

from grpo_core.system.libraries import quiet_libraries
from grpo_core.system.processes import importing, run_and_leave

if TYPE_CHECKING:
    import torch
    from transformers import Qwen2ForCausalLM, Qwen2Tokenizer

SEED = 0
TRAIN_ROWS, EVAL_ROWS = 5000, 500
PAD, EOS, UNK = "<pad>", "<eos>", "<unk>"
ALPHABET = "0123456789+="
TARGET, MAX_STEPS, EVAL_EVERY = 0.42, 800, 10
BATCH, LEARNING_RATE, WARMUP = 128, 2e-3, 20

Row = dict[str, str]


def make_rows(seed: int = SEED) -> tuple[list[Row], list[Row]]:
    """Training and held-out sums; neither a held-out sum nor its mirror image (b+a) is ever trained on."""
    rng = random.Random(seed)
    pairs = [(a, b) for a in range(10, 100) for b in range(a, 100)]
    rng.shuffle(pairs)
    held_out = [rng.choice([(a, b), (b, a)]) for a, b in pairs[:EVAL_ROWS]]
    rest = sorted({sum_ for a, b in pairs[EVAL_ROWS:] for sum_ in ((a, b), (b, a))})
    trained = rng.sample(rest, TRAIN_ROWS)
    train, held = ([{"prompt": f"{a}+{b}=", "answer": str(a + b)} for a, b in sums] for sums in (trained, held_out))
    return train, held


def make_tokenizer() -> Qwen2Tokenizer:
    """One token a character; like any Qwen2 tokenizer it drops what its vocabulary lacks.

    AutoTokenizer reads any tokenizer beside a Qwen2 model as this class, and would replace another's pre-tokenizer.
    """
    from transformers import Qwen2Tokenizer

    vocab = {token: i for i, token in enumerate([PAD, EOS, UNK, *ALPHABET])}
    return Qwen2Tokenizer(
        vocab=vocab, merges=[], pad_token=PAD, eos_token=EOS, unk_token=UNK, model_max_length=64, padding_side="left"
    )


def make_model(tokenizer: Qwen2Tokenizer) -> Qwen2ForCausalLM:
    from transformers import GenerationConfig, Qwen2Config, Qwen2ForCausalLM

    ids = {"bos_token_id": None, "eos_token_id": tokenizer.eos_token_id, "pad_token_id": tokenizer.pad_token_id}
    config = Qwen2Config(
        vocab_size=len(tokenizer),
        hidden_size=128,
        intermediate_size=512,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=64,
        tie_word_embeddings=False,  # an engine may keep a packed copy of a tied head; here there is none
        dtype="float32",
        **ids,
    )
    model = Qwen2ForCausalLM(config)
    model.generation_config = GenerationConfig(do_sample=False, **ids)
    return model


def encode(rows: list[Row], tokenizer: Qwen2Tokenizer) -> tuple[torch.Tensor, torch.Tensor]:
    """Right-padded token ids, and the same with -100 wherever the loss must not look (prompt and padding)."""
    import torch

    inputs, labels = [], []
    for row in rows:
        prompt = tokenizer.encode(row["prompt"])
        answer = [*tokenizer.encode(row["answer"]), tokenizer.eos_token_id]
        inputs.append(prompt + answer)
        labels.append([-100] * len(prompt) + answer)
    width = max(map(len, inputs))
    padded = [ids + [tokenizer.pad_token_id] * (width - len(ids)) for ids in inputs]
    masked = [ids + [-100] * (width - len(ids)) for ids in labels]
    return torch.tensor(padded), torch.tensor(masked)


def measure(model: Qwen2ForCausalLM, inputs: torch.Tensor, labels: torch.Tensor) -> dict[str, float]:
    """Exact held-out figures from one forward pass, with nothing generated.

    Greedy decoding gives the right answer just when every token of it is the likeliest after those before it; and the
    probability of sampling the whole answer at temperature 1 is the product of the probabilities of its tokens.
    """
    import torch

    with torch.no_grad():
        logits = model(input_ids=inputs, use_cache=False).logits[:, :-1]
    targets = labels[:, 1:]
    ignored = targets == -100
    greedy = ((logits.argmax(-1) == targets) | ignored).all(1)
    logprobs = logits.log_softmax(-1).gather(-1, targets.clamp(min=0).unsqueeze(-1)).squeeze(-1)
    sampled = logprobs.masked_fill(ignored, 0).sum(1).exp()
    return {
        "greedy_accuracy": greedy.float().mean().item(),
        "sampled_accuracy": sampled.mean().item(),
        "pass_at_8": (1 - (1 - sampled) ** 8).mean().item(),
    }


def train_base(train: list[Row], held: list[Row]) -> tuple[Qwen2ForCausalLM, Qwen2Tokenizer, dict[str, float]]:
    import torch

    torch.set_num_threads(2)  # the same base whatever the number of cores; a model this small has no use for more
    torch.manual_seed(SEED)
    started = time.perf_counter()
    tokenizer = make_tokenizer()
    model = make_model(tokenizer)
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
            figures = measure(model, held_inputs, held_labels)
            accuracy = figures["greedy_accuracy"]
            print(f"step {step:3d}  loss {loss.item():.3f}  held-out accuracy {accuracy:5.1%}", flush=True)
            if accuracy >= TARGET:
                info = {**figures, "parameters": model.num_parameters(), "steps": step}
                return model, tokenizer, info | {"seconds": round(time.perf_counter() - started, 1)}
    raise SystemExit(f"the base did not reach {TARGET:.0%} in {MAX_STEPS} steps")


def build(out: Path, source: str) -> dict[str, float]:
    """Makes everything in a folder beside `out` and renames it, so that an interrupted build leaves `out` as it was."""
    with importing():
        import pyarrow as pa
        import pyarrow.parquet as pq
        from transformers import GenerationConfig, Qwen2Config, Qwen2ForCausalLM, Qwen2Tokenizer  # noqa: F401
        from transformers.utils.logging import disable_progress_bar

    out.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=f".{out.name}-", dir=out.parent) as scratch:
        new = Path(scratch, "new")
        new.mkdir()
        disable_progress_bar()
        train, held = make_rows()
        pq.write_table(pa.Table.from_pylist(list(train)), new / "train.parquet")
        pq.write_table(pa.Table.from_pylist(list(held)), new / "eval.parquet")
        model, tokenizer, info = train_base(train, held)
        model.save_pretrained(new / "base")
        tokenizer.save_pretrained(new / "base")
        (new / "info.json").write_text(json.dumps({"source": source, **info}, indent=2) + "\n")
        if out.exists():
            out.rename(Path(scratch, "old"))
        new.rename(out)
    return info


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, default=Path("storage/examples/arithmetic"))
    out: Path = parser.parse_args().out
    source = hashlib.sha256(Path(__file__).read_bytes()).hexdigest()
    info_file = out / "info.json"
    made_by = json.loads(info_file.read_text()).get("source") if info_file.is_file() else None
    if made_by == source:
        print(f"{out} is up to date")
        return
    if made_by is None and out.exists() and (not out.is_dir() or any(out.iterdir())):
        raise SystemExit(f"{out} holds something this script did not make; choose another --out")
    quiet_libraries()
    print("loading torch, then teaching the base model (about half a minute)", flush=True)
    info = build(out, source)
    print(f"{out}: train.parquet ({TRAIN_ROWS} sums), eval.parquet ({EVAL_ROWS} sums)")
    print(f"{out / 'base'}: {info['parameters']:,} parameters, {info['steps']} steps, {info['seconds']} s")
    print(f"the base answers {info['greedy_accuracy']:.1%} of the held-out sums")


if __name__ == "__main__":
    run_and_leave(main)
