"""Tries each family of causal language models that transformers has: python -m benchmarks.families

A small copy of the family's configuration, with random weights in float32 on a CPU, is trained and sampled from as by a
run. Log-probabilities, gradients and the logits of the engine's cache are held against plain passes over single rows,
with nothing of ours. Each family has a process of its own. Writes docs/reference/models.md.
"""

from __future__ import annotations

import argparse
import json
import re
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
import transformers
from transformers import CONFIG_MAPPING, AutoModelForCausalLM
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from benchmarks.command import ROOT
from grpo_core.model.capabilities import check_padding
from grpo_core.model.policy import Policy
from grpo_core.model.pretrained import from_config
from grpo_core.model.sequences import Sequences
from grpo_core.model.small_copy import small_config
from grpo_core.planning.shapes import FAMILIES as FORECAST
from grpo_core.rollout.transformers_engine import TransformersEngine

PAGE = ROOT / "docs" / "reference" / "models.md"
SECONDS, EXACT = 300, 1e-4
LENGTHS = [(3, 5), (3, 9), (8, 1), (5, 12)]  # tokens of prompt and completion; the first two have the same prompt
# Encoders, and the text decoders of translation, speech and image models.
NOT_FOR_TEXT = re.compile(
    r".*(bart|bert|bird|blenderbot|data2vec|electra|marian|musicgen|pegasus|prophetnet|reformer|roformer|trocr|whisper"
    r"|assistant|xlm|xlnet|xmod).*|cpmant|ernie|git|mvp"
)
# What real models say and transformers' own configuration of the family does not.
SAID: dict[str, dict[str, Any]] = {
    "bamba": {"attn_layer_indices": [1], "num_hidden_layers": 2},
    "granitemoehybrid": {"layer_types": ["linear_attention", "full_attention"], "num_hidden_layers": 2},
    "lfm2": {"layer_types": ["conv", "full_attention"], "num_hidden_layers": 2},
}
ROPE = {"rope_parameters": {"rope_type": "default", "rope_theta": 10000.0}}
SAID |= dict.fromkeys(("hunyuan_v1_dense", "hunyuan_v1_moe", "ministral", "lfm2_moe"), ROPE)


def main() -> None:
    parser = argparse.ArgumentParser(description=str(__doc__).partition("\n")[0])
    parser.add_argument("--only", nargs="*", metavar="FAMILY", help="of these; with an --output")
    parser.add_argument("--output", type=Path, metavar="FILE", help="default docs/reference/models.md")
    parser.add_argument("--one", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.one:
        print(json.dumps(try_family(options.one)))
        return
    if options.only and not options.output:
        parser.error("--only: give an --output, since a few families must not replace the page of all")
    names = options.only or sorted(it for it in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES if not NOT_FOR_TEXT.fullmatch(it))
    found: dict[str, dict[str, Any]] = {}
    with ThreadPoolExecutor(2) as pool:
        for name, found[name] in zip(names, pool.map(in_own_process, names), strict=True):
            print(f"{len(found)} of {len(names)}: {name} {json.dumps(found[name])}", flush=True)
    (options.output or PAGE).write_text(page(found))


def in_own_process(family: str) -> dict[str, Any]:
    command = [sys.executable, "-m", "benchmarks.families", "--one", family]
    try:
        done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=SECONDS)
    except subprocess.TimeoutExpired:
        return {"not_tried": f"its small copy takes more than {SECONDS} s"}
    if done.returncode:
        said = done.stderr.strip().splitlines() or [f"its process ended with {done.returncode}"]
        return {"not_tried": said[-1][:120]}
    return json.loads(done.stdout.splitlines()[-1])


def try_family(family: str) -> dict[str, Any]:
    """What a small copy of the family's configuration does: differences from plain rows, and reasons."""
    torch.set_num_threads(1)
    torch.manual_seed(0)
    model = from_config(AutoModelForCausalLM, small_config(CONFIG_MAPPING[family](**SAID.get(family, {}))))
    model = model.float().eval()
    for weights in model.parameters():
        if weights.dim() > 1:
            torch.nn.init.normal_(weights, std=0.05)
    longest, sequences = sum(max(LENGTHS, key=sum)), rows()
    weights_of = torch.linspace(-1, 1, len(LENGTHS) * max(c for _, c in LENGTHS)).view(len(LENGTHS), -1)

    def gradients(logprobs: torch.Tensor) -> list[torch.Tensor]:
        model.zero_grad()
        (weights_of * logprobs).sum().backward()
        return [torch.zeros_like(p) if p.grad is None else p.grad.clone() for p in model.parameters()]

    plain = plain_logprobs(model, sequences)
    plain_gradients = gradients(plain)
    found: dict[str, Any] = {}
    try:
        check_padding(model, longest)
        policy = Policy(model, 1.0, max_length=longest)
        logprobs, _ = policy(policy.prepare(sequences))
        apart = [ours - theirs for ours, theirs in zip(gradients(logprobs), plain_gradients, strict=True)]
        norms = [sum(float((each**2).sum()) for each in some) ** 0.5 for some in (apart, plain_gradients)]
        found |= {"logprobs": float((logprobs - plain).detach().abs().max()), "gradient": norms[0] / norms[1]}
        found |= {"packs": policy.packs, "not_packed": policy.why_not}
    except Exception as error:  # of whatever kind: another architecture
        found["not_trained"] = " ".join(f"{error}".split())
    model.zero_grad()
    try:
        engine = TransformersEngine(model, SimpleNamespace(pad_token_id=0, eos_token_id=2), longest)
        found["shares"] = engine.shares_cache
    except Exception as error:
        found["not_sampled"] = " ".join(f"{error}".split())
    return found


def rows() -> Sequences:
    ids = [torch.randint(3, 500, (prompt + completion,)) for prompt, completion in LENGTHS]
    ids[1][: LENGTHS[0][0]] = ids[0][: LENGTHS[0][0]]
    prompts, completions = torch.tensor(LENGTHS).unbind(1)
    padded = torch.nn.utils.rnn.pad_sequence(ids, batch_first=True)
    return Sequences(padded, prompts, completions, torch.tensor([0, 0, 1, 2]))


def plain_logprobs(model: Any, sequences: Sequences) -> torch.Tensor:
    """Log-probabilities of the completions, by a pass for each row. (rows, tokens), 0 past an end"""
    found = torch.zeros(len(LENGTHS), max(completion for _, completion in LENGTHS))
    for row, (prompt, completion) in enumerate(LENGTHS):
        ids = sequences.input_ids[row, : prompt + completion]
        logits = model(input_ids=ids[None], use_cache=False).logits[0, prompt - 1 : -1].float()
        found[row, :completion] = logits.log_softmax(-1).gather(1, ids[prompt:, None]).squeeze(1)
    return found


def page(found: dict[str, dict[str, Any]]) -> str:
    tried = {family: it for family, it in found.items() if "not_tried" not in it}
    trained = [family for family, it in tried.items() if is_exact(it)]
    sampled = [family for family in trained if "not_sampled" not in tried[family]]
    packed = [family for family in trained if tried[family]["packs"]]
    lines = [
        "# Models",
        "",
        f"Which families of models train here: **{len(trained)} of the {len(tried)} tried of transformers",
        f"{transformers.__version__} train exactly; {len(sampled)} of them are sampled from by the engine",
        f"`transformers`, {len(packed)} are packed.** Written by `python -m benchmarks.families`, which tries a small",
        "copy of each, with random weights, in float32 on a CPU. vLLM and GPUs were not tried here.",
        "",
        "*trains*: log-probabilities and gradients are those of plain passes over single rows (to 1e-4). *packs*: a",
        "prompt is computed once for its completions, and nothing is padded; otherwise rows are. *samples*: with its",
        "cache, the engine `transformers` has the logits of plain passes; *shared* if",
        "completions share their prompt's keys and values. *memory*: `grpo plan` forecasts it.",
        "",
        "| `model_type` | trains | packs | samples | memory |",
        "|---|---|---|---|---|",
        *(row(family, it) for family, it in tried.items()),
    ]
    if others := sorted(found.keys() - tried.keys()):
        lines += [
            "",
            f"Of these, no small copy of transformers' own configuration was made or run: {', '.join(others)}.",
        ]
    return "\n".join(lines) + "\n"


def is_exact(it: dict[str, Any]) -> bool:
    return "not_trained" not in it and it["logprobs"] < EXACT and it["gradient"] < EXACT


def row(family: str, it: dict[str, Any]) -> str:
    trains = "yes" if is_exact(it) else "no"
    packs = "yes" if it.get("packs") else "no"
    samples = "no" if "not_sampled" in it else "shared" if it["shares"] else "yes"
    return f"| {family} | {trains} | {packs} | {samples} | {'yes' if family in FORECAST else ''} |"


if __name__ == "__main__":
    main()
