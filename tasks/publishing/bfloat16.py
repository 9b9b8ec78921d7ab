"""`python -m tasks.publishing.bfloat16 SOURCE TARGET`: writes the weights of a saved model to another folder, which has
its other files already, in bfloat16."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file


def main() -> None:
    source, target = map(Path, sys.argv[1:])
    size = 0
    for file in sorted(source.glob("*.safetensors")):
        tensors = {name: it.bfloat16() if it.is_floating_point() else it for name, it in load_file(file).items()}
        size += sum(it.nbytes for it in tensors.values())
        save_file(tensors, target / file.name, metadata={"format": "pt"})
    config = target / "config.json"
    values = json.loads(config.read_text())
    for part in (values, values.get("text_config")):
        if part is not None:
            part["dtype"] = str(torch.bfloat16).removeprefix("torch.")
    config.write_text(json.dumps(values, indent=2) + "\n")
    for index in target.glob("*.index.json"):
        index.write_text(
            json.dumps(json.loads(index.read_text()) | {"metadata": {"total_size": size}}, indent=2) + "\n"
        )


if __name__ == "__main__":
    main()
