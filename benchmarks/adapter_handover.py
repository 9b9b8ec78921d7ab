"""Compares two ways to hand a LoRA over to a vLLM server on this machine's CPU: the adapter alone, or merged
weights; and says which part of the time goes into checksums."""

from __future__ import annotations

import argparse
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

from accelerate import PartialState

from benchmarks.command import parse
from tests.conftest import config_values, make_model, make_run
from tests.serving import free_ports, policy_server

MODEL: dict[str, Any] = {
    "hidden_size": 512,
    "intermediate_size": 1536,
    "num_hidden_layers": 8,
    "num_attention_heads": 8,
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rank", type=int, default=16, help="of the adapter; default 16")
    parser.add_argument("--rounds", type=int, default=10, help="hand-overs of each kind; default 10")
    parser.add_argument("--transfer", choices=["shared_memory", "http"], default="shared_memory")
    arguments = parse(parser)
    sizes = MODEL | ({"num_hidden_layers": 1} if arguments.tiny else {})
    with tempfile.TemporaryDirectory() as scratch:
        found = measure(Path(scratch), sizes, arguments.rank, arguments.rounds, arguments.transfer)
        for way, (size, seconds, of_checksums) in found.items():
            milliseconds = [1000 * second for second in seconds]
            median, checksums = statistics.median(milliseconds), 1000 * statistics.median(of_checksums)
            print(
                f"{way}: {size / 1e6:.2f} MB, {median:.0f} ms ({min(milliseconds):.0f} to {max(milliseconds):.0f}), "
                f"of which checksums on both sides: {checksums:.1f} ms ({checksums / median:.1%})"
            )


def measure(
    folder: Path, sizes: dict[str, Any], rank: int, rounds: int, transfer: str
) -> dict[str, tuple[int, list[float], list[float]]]:
    """Measure bytes of the tensors and seconds of each hand-over, both ways in turn, to the same server; and twice the
    seconds that the checksums of what was sent take here."""
    import torch

    from grpo_core.config.files import load_config
    from grpo_core.model.loading import copy_of_whole_weights, load_model, trainable_state, with_adapter
    from grpo_core.rollout.checksums import checksums_of
    from grpo_core.rollout.vllm.adapter import adapter_of
    from grpo_core.rollout.vllm.server_engine import VLLMServerEngine

    PartialState()
    path = make_model(folder / "model", vocab_size=8192, **sizes)
    (port,) = free_ports(1)
    keys: dict[str, Any] = {"vllm_server_timeout": 600.0, "vllm_weight_transfer": transfer}
    keys |= {"use_peft": True, "lora_r": rank, "vllm_server_base_urls": [f"http://127.0.0.1:{port}"]}
    run = make_run(folder / "run", config_values(path, folder, engine="vllm-server", **keys))
    config = load_config(run / "config.toml")
    model = with_adapter(load_model(path), config.model)
    with policy_server(run / "config.toml", port, folder / "server.log"):
        engine = VLLMServerEngine(config, model, 32)
        rank = engine.adapter_rank
        found: dict[str, tuple[int, list[float], list[float]]] = {
            "adapter": (_bytes(adapter_of(model, torch.float32)[1]), [], []),
            "merged": (_bytes(copy_of_whole_weights(model)), [], []),
        }
        for _ in range(rounds):
            # After full weights, the first hand-over of an adapter includes the base.
            for way in ("merged", "base again", "adapter"):
                for tensor in trainable_state(model).values():
                    tensor += 0.01 * torch.randn_like(tensor)
                engine.adapter_rank = 0 if way == "merged" else rank
                start = time.perf_counter()
                engine.sync_weights(model)
                if way in found:
                    found[way][1].append(time.perf_counter() - start)
                    start = time.perf_counter()
                    checksums_of(engine.servers[0].wanted.snapshot or {})
                    found[way][2].append(2 * (time.perf_counter() - start))
        engine.close()
    return found


def _bytes(tensors: dict[str, Any]) -> int:
    """Bytes of the tensors with memory of their own: a tied head is sent once."""
    return sum({tensor.data_ptr(): tensor.nbytes for tensor in tensors.values()}.values())


if __name__ == "__main__":
    main()
