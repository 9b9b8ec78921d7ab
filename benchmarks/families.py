"""Tries each family of causal language models that transformers has: python -m benchmarks.families

A small copy of the family's configuration, with random weights in float32 on a CPU, is trained and sampled from as by a
run. Log-probabilities, gradients and the logits of the engine's cache are held against plain passes over single rows,
with nothing of ours; once as it is, and once with windows and other lengths that the sequences exceed. peft says which
layers an adapter is for, vLLM's registry which models it has. Each family has a process of its own. Writes
docs/reference/models.md.
"""

from __future__ import annotations

import argparse
import copy
import json
import multiprocessing
import re
import subprocess
import sys
import textwrap
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
import transformers
from transformers import CONFIG_MAPPING
from transformers.models.auto.modeling_auto import (
    MODEL_FOR_CAUSAL_LM_MAPPING_NAMES,
    MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES,
)

from benchmarks.command import ROOT
from grpo_core.config.inputs import ModelConfig
from grpo_core.model.capabilities import check_padding, shown
from grpo_core.model.loading import with_adapter
from grpo_core.model.policy import Policy
from grpo_core.model.pretrained import from_config
from grpo_core.model.sequences import Sequences
from grpo_core.model.small_copy import small_config
from grpo_core.planning.shapes import FAMILIES as FORECAST
from grpo_core.rollout.transformers_engine import TransformersEngine

PAGE = ROOT / "docs" / "reference" / "models.md"
SECONDS, EXACT = 300, 1e-4
FORKS = multiprocessing.get_context("forkserver")  # of a process that has imported what takes long
FORKS.set_forkserver_preload(["peft", "grpo_core.rollout.transformers_engine"])
LENGTHS = [(24, 40), (24, 47), (30, 1), (5, 67)]  # tokens of prompt and completion; the first two have the same prompt
# Lengths of a model that change what it computes beyond them, and what they are in the second try.
SHORT = dict.fromkeys(("index_topk_blocks", "topk_blocks", "block_topk"), 2)
SHORT |= dict.fromkeys(("sliding_window", "sliding_window_size", "window_size", "attention_window_size"), 8)
SHORT |= dict.fromkeys(("keep_window_size", "attention_chunk_size", "floor_scale", "log_scaling_n_floor"), 8)
SHORT |= dict.fromkeys(("index_topk", "index_block_size", "indexer_budget", "token_budget"), 8)
SHORT |= dict.fromkeys(("chunk_size", "mamba_chunk_size"), 8)  # of recurrences
USUAL = {"q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"}
# Prints the architectures that vLLM lists, without an engine.
LISTED = "import json, vllm; print(json.dumps([*vllm.ModelRegistry.get_supported_archs()]))"
RUN = ROOT / "tests" / "grpo_core" / "rollout" / "test_vllm_weights.py"  # with real engines
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
SAID |= dict.fromkeys(("hunyuan_v1_dense", "hunyuan_v1_moe", "ministral"), ROPE | {"head_dim": 128})
SAID |= {"lfm2_moe": ROPE | SAID["lfm2"], "nemotron": {"num_key_value_heads": 8}}
SAID |= {"deepseek_v2": {"num_experts_per_tok": 6}}
SAID |= {"dots1": {"n_routed_experts": 128, "num_experts_per_tok": 6, "n_shared_experts": 2}}
INDEXER = {"n_heads": 4, "kv_heads": 1, "head_dim": 256, "budget": 256, "compress_ratio": 4}
SAID |= {"qwen4_exp_text": {f"indexer_{name}": value for name, value in INDEXER.items()}}


def main() -> None:
    parser = argparse.ArgumentParser(description=str(__doc__).partition("\n")[0])
    parser.add_argument("--only", nargs="*", metavar="FAMILY", help="of these; with an --output")
    parser.add_argument("--output", type=Path, metavar="FILE", help="default docs/reference/models.md")
    options = parser.parse_args()
    if options.only and not options.output:
        parser.error("--only: give an --output, since a few families must not replace the page of all")
    listed = subprocess.run([sys.executable, "-c", LISTED], cwd=ROOT, capture_output=True, text=True)
    known = {*json.loads(listed.stdout.splitlines()[-1])} if listed.returncode == 0 else None
    names = options.only or sorted(it for it in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES if not NOT_FOR_TEXT.fullmatch(it))
    found: dict[str, dict[str, Any]] = {}
    with ThreadPoolExecutor(2) as pool:
        for name, found[name] in zip(names, pool.map(in_own_process, names), strict=True):
            print(f"{len(found)} of {len(names)}: {name} {json.dumps(found[name])}", flush=True)
    (options.output or PAGE).write_text(page(found, known))


def in_own_process(family: str) -> dict[str, Any]:
    ours, theirs = FORKS.Pipe(duplex=False)
    process = FORKS.Process(target=tell, args=(family, theirs))
    process.start()
    theirs.close()
    try:
        found = ours.recv() if ours.poll(SECONDS) else {"not_tried": f"its small copy takes more than {SECONDS} s"}
    except EOFError:
        process.join()
        found = {"not_tried": f"its process ended with {process.exitcode}"}
    process.kill()
    process.join()
    return found


def tell(family: str, to: Any) -> None:
    try:
        to.send(try_family(family))
    except Exception as error:  # of whatever kind, the family's own
        to.send({"not_tried": shown(error)})


def try_family(family: str) -> dict[str, Any]:
    """What small copies of the family's configuration do: as it is, and "beyond" its own lengths, if it has any."""
    torch.set_num_threads(1)
    config = small_config(CONFIG_MAPPING[family](**SAID.get(family, {})))
    found = try_model(model_of(config)) | {"adapted": adapted_layers(config)}
    text = (shorter := copy.deepcopy(config)).get_text_config()
    lengths = [
        name for name, length in SHORT.items() if isinstance(it := getattr(text, name, None), int) and it > length
    ]
    for name in lengths:
        setattr(text, name, SHORT[name])
    return found | ({"beyond": try_model(model_of(shorter)), "lengths": lengths} if lengths else {})


def model_of(config: Any) -> Any:
    torch.manual_seed(0)
    model = from_config(copy.deepcopy(config)).float().eval()
    for weights in model.parameters():
        if weights.dim() > 1:
            torch.nn.init.normal_(weights, std=0.05)
    return model


def try_model(model: Any) -> dict[str, Any]:
    """Differences from plain rows, and reasons."""
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
        found["not_trained"] = shown(error)
    model.zero_grad()
    try:
        engine = TransformersEngine(model, SimpleNamespace(pad_token_id=0, eos_token_id=2), longest)
        found["shares"] = engine.shares_cache
    except Exception as error:
        found["not_sampled"] = shown(error)
    return found


def adapted_layers(config: Any) -> list[str] | str:
    """Names of the layers that have an adapter, which trains; else the reason."""
    try:
        adapted = with_adapter(model_of(config), ModelConfig(name_or_path=".", use_peft=True))
        adapted(torch.arange(3, 20)[None], use_cache=False).logits.logsumexp(-1).sum().backward()
    except Exception as error:  # of whatever kind, of peft's or the architecture's
        return shown(error)
    layers = {name: module for name, module in adapted.named_modules() if hasattr(module, "get_delta_weight")}
    if not any(p.grad is not None and p.grad.any() for p in adapted.parameters()):
        return "its adapter has no gradient"
    found = {name.rpartition(".")[2] for name, it in layers.items() if not hasattr(it, "parameter_name")}
    return sorted(found) + ["experts"] * any(hasattr(it, "parameter_name") for it in layers.values())


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


def page(found: dict[str, dict[str, Any]], known: set[str] | None) -> str:
    tried = {family: it for family, it in found.items() if "not_tried" not in it}
    trained = [family for family, it in tried.items() if is_exact(it)]
    whole = [family for family in trained if is_exact(tried[family].get("beyond", tried[family]))]
    sampled = [family for family in trained if "not_sampled" not in tried[family]]
    packed = [family for family in trained if tried[family]["packs"]]
    listed = [family for family in trained if with_vllm(family, known)]
    others = sorted(found.keys() - tried.keys())
    said = f"""Which families of models train here: **{len(trained)} of the {len(tried)} tried of transformers
{transformers.__version__} train exactly; {len(sampled)} of them are sampled from by the engine `transformers`,
{len(packed)} are packed, {len(listed)} are known to vLLM.** Written by `python -m benchmarks.families`, which tries a
small copy of each, with random weights, in float32 on a CPU, with sequences of up to {sum(max(LENGTHS, key=sum))}
tokens. GPUs were not tried here."""
    twice = f"""{sum("beyond" in it for it in tried.values())} families were tried twice: as they are, and with each of
their own lengths (windows, chunks, chosen keys or blocks) cut to 8 tokens or 2 blocks, which the sequences exceed.
Where that gives something else, it stands behind *beyond*. {len(whole)} train exactly in both."""
    untried = f"""No small copy of these families could be made or run, so they were not tried:
{", ".join(others)}. They may train: each plan tries its model first."""
    return f"""# Models

{textwrap.fill(said, 115, break_on_hyphens=False)}

{textwrap.fill(twice, 115, break_on_hyphens=False)}

- *trains*: log-probabilities and gradients are those of plain passes over single rows (to 1e-4)
- *packs*: a prompt is computed once for its completions, and nothing is padded; otherwise rows are
- *samples*: with its cache, the engine `transformers` has the logits of plain passes; *shared* if completions share
  their prompt's keys and values
- *memory*: `grpo plan` forecasts it
- *LoRA*: the layers that `model.use_peft` adapts without `model.lora_target_modules`, and trains; *usual*: `q_proj`,
  `k_proj`, `v_proj`, `o_proj`, `gate_proj`, `up_proj`, `down_proj`
- *vLLM*: *listed* in the registry of the vLLM that is installed here; *run* by this project's tests

| `model_type` | trains | packs | samples | memory | LoRA | vLLM |
|---|---|---|---|---|---|---|
{"".join(row(family, it, known) for family, it in tried.items())}
## Why not

{"".join(reasons(family, it) for family, it in tried.items())}
{textwrap.fill(untried, 115, break_on_hyphens=False)}

Next: [what is refused, GGUF files, multimodal checkpoints](algorithm.md#models), [mixtures of
experts](../how-to/mixtures-of-experts.md), [forecasts](plan.md#families).
"""


def is_exact(it: dict[str, Any]) -> bool:
    return "not_trained" not in it and it["logprobs"] < EXACT and it["gradient"] < EXACT


def row(family: str, it: dict[str, Any], known: set[str] | None) -> str:
    tries = (it, it.get("beyond", it))
    trains = cell(*("yes" if is_exact(each) else "no" for each in tries))
    packs = cell(*("yes" if each.get("packs") else "no" for each in tries))
    samples = cell(*("no" if "not_sampled" in each else "shared" if each["shares"] else "yes" for each in tries))
    memory, names = "yes" if family in FORECAST else "", it["adapted"]
    lora = "no" if isinstance(names, str) else ", ".join(short_names(names))
    return f"| {family} | {trains} | {packs} | {samples} | {memory} | {lora} | {with_vllm(family, known)} |\n"


def cell(first: str, beyond: str) -> str:
    return first if first == beyond else f"{first}, beyond {beyond}"


def short_names(names: list[str]) -> list[str]:
    """Names of layers, in which those that most models have are one word."""
    rest = [name if name == "experts" else f"`{name}`" for name in names if name not in USUAL or not {*names} >= USUAL]
    return ["usual"] * ({*names} >= USUAL) + rest


def with_vllm(family: str, known: set[str] | None) -> str:
    names = [MODEL_FOR_CAUSAL_LM_MAPPING_NAMES[family], MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES.get(family)]
    if f'"{str(names[0]).removesuffix("ForCausalLM")}"' in RUN.read_text():
        return "run"
    return "?" if known is None else "listed" if known & {*names} else ""


def reasons(family: str, it: dict[str, Any]) -> str:
    """Lines of a list with what was raised, or differs, where the table says no."""
    found = []
    for each, lengths in ((it, ""), (it.get("beyond", {}), f" beyond {' and '.join(it.get('lengths', []))}")):
        if "not_trained" in each:
            found.append(f"not trained{lengths}: {each['not_trained']}")
        elif each and not is_exact(each):
            found.append(f"not trained{lengths}: off by {each['logprobs']:.1g}, gradients by {each['gradient']:.1g}")
        if "not_sampled" in each:
            found.append(f"not sampled{lengths}: {each['not_sampled']}")
    if isinstance(it["adapted"], str):
        found.append(f"no LoRA: {it['adapted']}")
    return "".join(f"- {family}: {textwrap.shorten(text, 200, placeholder=' …')}\n" for text in found)


if __name__ == "__main__":
    main()
