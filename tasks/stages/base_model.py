"""A GGUF file as the base model: made an ordinary checkpoint once, in STORAGE/bases/, which all that reads a base then
sees in the file's place."""

from __future__ import annotations

import fcntl
import json
import os
import re
from collections.abc import Callable
from contextlib import suppress
from datetime import date
from importlib.metadata import version
from pathlib import Path
from typing import Any

from grpo_core.config.run import RunConfig
from grpo_core.errors import ConfigError
from grpo_core.fingerprint import content_hash
from grpo_core.system.files import publish
from grpo_core.system.processes import importing
from tasks.stages.files import remove
from tasks.stages.lineage import DIGITS
from tasks.stages.locks import holding
from tasks.stages.run_directory import storage_root

BASES = "bases"  # folder under the storage root
ORIGIN = ".made_from.json"  # hidden, so that it is no part of a checkpoint's content


def with_checkpoint(config: RunConfig, say: Callable[[str], None], *, download: bool = True) -> RunConfig:
    """Return the configuration with the checkpoint of its GGUF file in the file's place; as it is without such a file,
    and without `download` if the file is not on this machine. Raises ConfigError if there is none, or transformers
    cannot read it, or not all of it. The file's content names the checkpoint: whatever process comes first makes it.
    """
    keys = config.model
    if keys.gguf_file is None:
        return config
    from transformers.utils import cached_file

    try:
        at = cached_file(keys.name_or_path, keys.gguf_file, revision=keys.revision, local_files_only=not download)
        file = Path(str(at))
    except OSError as error:
        if not download:
            return config
        raise ConfigError(f"model.gguf_file = {keys.gguf_file!r}: {error}") from error
    folder, content = storage_root() / BASES, content_hash(str(file))
    folder.mkdir(parents=True, exist_ok=True)
    made = folder / f"{re.sub(r'[^A-Za-z0-9._-]', '-', file.stem)}-{content[:DIGITS]}"
    with holding(descriptor := os.open(folder, os.O_RDONLY)):
        fcntl.flock(descriptor, fcntl.LOCK_EX)  # one process converts, others wait for what it makes
        if not made.exists():
            say(f"{file} is made an ordinary checkpoint, once: {made}")
            remove(partial := made.with_name(f"{made.name}.partial"))
            _write_checkpoint(file, partial)
            origin = {"file": str(file), "content": content, "date": date.today().isoformat()}
            (partial / ORIGIN).write_text(json.dumps(origin | {"transformers": version("transformers")}, indent=1))
            publish(partial, made)
        with suppress(OSError):  # another user's, or of before
            os.utime(made / ORIGIN)  # `grpo clean` sees by it that the checkpoint is used
    base = {"name_or_path": str(made), "gguf_file": None, "revision": None}
    return config.model_copy(update={"model": keys.model_copy(update=base)})


def _write_checkpoint(file: Path, folder: Path) -> None:
    """Write the file's model, dequantised to float32, and its tokenizer, with chat template and end tokens."""
    with importing():
        import torch
        import transformers
        from gguf import GGUFReader
        from transformers import AutoModelForCausalLM, AutoTokenizer, GgufConfig

        from grpo_core.model.checkpoint_fit import misfit
        from grpo_core.model.pretrained import from_pretrained

    try:
        reader = GGUFReader(file)
        model, found = from_pretrained(
            AutoModelForCausalLM,
            file.parent,
            gguf_file=file.name,
            dtype=torch.float32,
            quantization_config=GgufConfig(dequantize=True),
            ignore_mismatched_sizes=True,
            output_loading_info=True,
        )
        tokenizer = from_pretrained(AutoTokenizer, file.parent, gguf_file=file.name)
    except Exception as error:  # of whatever kind: an architecture, a quantisation or a tokenizer that it does not know
        raise ConfigError(f"{file}: transformers {transformers.__version__} cannot read it: {error}") from error
    fields: dict[str, Any] = {name: field.contents() for name, field in reader.fields.items() if len(field.data) == 1}
    if problem := misfit(model, found) or _unread(reader.tensors, fields, model, found):
        raise ConfigError(f"{file}: {problem}; name the checkpoint that it was made from")
    end = model.generation_config.eos_token_id
    ends = dict.fromkeys(end if isinstance(end, list) else [end])
    ends |= dict.fromkeys(fields.get(f"tokenizer.ggml.{name}_token_id") for name in ("eot", "eom"))  # of turns
    model.generation_config.eos_token_id = [each for each in ends if each is not None] or None
    if fields.get("tokenizer.ggml.add_bos_token"):
        tokenizer.add_bos_token = True
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)


def _unread(tensors: Any, fields: dict[str, Any], model: Any, found: Any) -> str:
    """Problem of a file that says more of the model than transformers has read; "" of one that it has read whole."""
    kind = fields.get(f"{fields['general.architecture']}.rope.scaling.type", "none")
    scaling = [tensor.name for tensor in tensors if tensor.name.startswith("rope_")]
    scaling += [f"rope.scaling.type = {kind!r}"] if kind != "none" else []
    rope = getattr(model.config.get_text_config(), "rope_parameters", None) or {}
    if scaling and rope.get("rope_type", "default") == "default":
        return f"it scales its rotary positions ({', '.join(scaling)}), which transformers does not read from GGUF"
    held = sum(int(tensor.n_elements) for tensor in tensors)
    made = sum({weights.data_ptr(): weights.numel() for weights in model.state_dict().values()}.values())
    if not found["unexpected_keys"] and held != made:
        return f"it holds {held:,} weights, and the {type(model).__name__} that transformers makes of it {made:,}"
    return ""
