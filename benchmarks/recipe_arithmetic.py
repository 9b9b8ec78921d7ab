"""Computes batch and steps of a recipe as the framework's own code does, without grpo_core.

The values are read in the simplest way: by one regular expression from the first command with `rlhf_type grpo`, `trl
grpo` or a GRPO script, or from the YAML. Megatron-SWIFT's functions are taken from the clone in the working folder and
run unchanged; TRL's and ms-swift's steps are those of TRL's RepeatSampler (trl/trainer/utils.py) under transformers'
Trainer (set_initial_training_values).
"""

from __future__ import annotations

import ast
import math
import re
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import yaml

MEGATRON = Path("swift/megatron/arguments/megatron_args.py")
SHARDING = ("tensor_model_parallel_size", "pipeline_model_parallel_size", "context_parallel_size")
Figures = tuple[int, int]


def expected(path: Path, system: str, rows: int) -> Figures | str | None:
    """Generation batch and steps; "refused"; None if the recipe cannot be read in this simple way."""
    values = _values(path.read_text(errors="replace"), path.suffix)
    if not values or any(str(value).startswith(("$", "<")) for value in values.values()):
        return None
    try:
        if {"global_batch_size", "micro_batch_size"} & values.keys():
            return _megatron(values, rows)
        return _trainer(values, rows, system)
    except (ValueError, AssertionError):
        return "refused"


def _values(text: str, suffix: str) -> dict[str, Any]:
    if suffix == ".yaml":
        values = yaml.safe_load(text)
        return {**values, **values.get("train", {})} if isinstance(values, dict) else {}
    lines = [line for line in text.replace("\\\n", " ").splitlines() if not line.lstrip().startswith("#")]
    commands = [line for line in lines if re.search(r"rlhf_type grpo|trl (grpo|rloo)|(grpo|gspo|rloo)\w*\.py", line)]
    if not commands or "..." in commands[0] or re.search(r"--(config|use_ray) ", commands[0]):
        return {}
    values = dict(re.findall(r"--(\w+)[ =]+('[^']*'|\"[^\"]*\"|[^\s-][^\s]*|-\d+)", commands[0]))
    for name in ("NPROC_PER_NODE", "NNODES"):
        if found := re.findall(rf"{name}=(\S+)", "\n".join(lines)):
            values[name] = found[0]
    if "trl rloo" in commands[0] or re.search(r"rloo\w*\.py", commands[0]):
        values.setdefault("num_generations", 2)
    return values if re.search(r"(rlhf|trl|\.py) .*--", commands[0]) else {}


def _megatron(values: dict[str, Any], rows: int) -> Figures:
    """Call ms-swift's own resolve_generation_batch_size, validate_batch_dp_alignment, _init_distributed and
    init_iters."""
    code = _functions()
    whole = {key: int(value) for key, value in values.items() if re.fullmatch(r"-?\d+", str(value))}
    defaults = {"micro_batch_size": 1, "global_batch_size": 16, "num_generations": 8, **dict.fromkeys(SHARDING, 1)}
    optional = dict.fromkeys(("generation_batch_size", "steps_per_generation", "num_train_epochs", "train_iters"))
    world = whole.get("gpus") or whole.get("NPROC_PER_NODE", 1) * whole.get("NNODES", 1)
    args = SimpleNamespace(**{**defaults, **optional, **whole})
    args.world_size, args.rlhf_type, args.save_strategy, args.eval_iters = world, "grpo", "steps", -1
    batch, _ = code["resolve_generation_batch_size"](
        args.generation_batch_size, args.steps_per_generation, args.global_batch_size, args.num_generations
    )
    code["initialize_megatron"] = lambda args: None
    code["_init_distributed"](args)
    replicas = args.data_parallel_size
    code["validate_batch_dp_alignment"](batch, args.num_generations, replicas, args.micro_batch_size, world)
    code["mpu"] = SimpleNamespace(get_data_parallel_world_size=lambda: replicas)
    code["init_iters"](args, range(rows), None)
    return batch, args.train_iters


def _functions() -> dict[str, Any]:
    wanted = ("resolve_generation_batch_size", "validate_batch_dp_alignment", "_init_distributed", "init_iters")
    found: dict[str, Any] = {"logger": SimpleNamespace(info=str), "Optional": None, "Tuple": None}
    for node in ast.walk(ast.parse(MEGATRON.read_text())):
        if isinstance(node, ast.FunctionDef) and node.name in wanted:
            node.decorator_list, node.returns = [], None
            for argument in node.args.args:
                argument.annotation = None
            exec(compile(ast.Module([node], []), str(MEGATRON), "exec"), found)
    return found


def _trainer(values: dict[str, Any], rows: int, system: str) -> Figures | None:
    def number(key: str, default: float) -> float:
        return float(str(values.get(key, default)).strip("'\""))

    b = int(number("per_device_train_batch_size", 1 if system == "swift" else 8))
    w = _world(values, system)
    g, a = int(number("num_generations", 8)), int(number("gradient_accumulation_steps", 1))
    if float(number("split_dataset_ratio", 0)) or not w:
        return None
    s = int(number("steps_per_generation", number("generation_batch_size", a * b * w) // (b * w)))
    batch, repeats = b * w * s, int(number("num_iterations", 1)) * s
    if batch % g or rows < batch // g:
        raise ValueError
    if g < 2 and "teacher_model" not in values:
        raise ValueError
    sampled = rows // (batch // g) * (batch // g) * g * repeats  # RepeatSampler.__len__
    loaded = sampled // (b * s) // w  # batches of b·S rows, shared out over the processes
    per_epoch = max(loaded // a + int(loaded % a > 0), 1)
    steps = int(number("max_steps", -1))
    return batch, steps if steps > 0 else math.ceil(number("num_train_epochs", 3) * per_epoch)


def _world(values: dict[str, Any], system: str) -> int:
    if system == "swift":
        nodes = values.get("NNODES", values.get("nnodes", 1))
        return int(values.get("NPROC_PER_NODE", values.get("nproc_per_node", 1))) * int(nodes)
    if "num_processes" in values:
        return int(values["num_processes"])
    return 8 if {"accelerate_config", "config_file"} & values.keys() else 1
