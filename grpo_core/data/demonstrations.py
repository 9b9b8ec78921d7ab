"""The demonstrations of a warm start as the stage validate or probe leaves them: token ids, one row each."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from grpo_core import run_files
from grpo_core.config.inputs import ModelConfig
from grpo_core.config.run import RunConfig
from grpo_core.data.prompts import FileRows

SCHEMA = pa.schema(
    {
        "prompt_ids": pa.list_(pa.int32()),
        "completion_ids": pa.list_(pa.int32()),
        "trained_tokens": pa.list_(pa.int8()),  # 1 per token that is trained, 0 per token of others
    }
)
# Metrics of an update that mean something without an engine.
METRICS = ("loss", "aux_loss", "entropy", "grad_norm", "learning_rate")


@dataclass(frozen=True)
class Demonstrations:
    """The rows, and their sizes in tokens."""

    rows: FileRows
    longest: int  # with its prompt
    longest_completion: int
    mean: float  # with their prompts
    trained: int  # tokens, of all

    @property
    def figures(self) -> dict[str, Any]:
        """The sizes as receipts have them."""
        sizes = {"longest": self.longest, "longest_completion": self.longest_completion, "mean": self.mean}
        return {"rows": len(self.rows), **sizes, "trained_tokens": self.trained}


def demonstrations_file(config: RunConfig, run: Path) -> Path:
    """File with the demonstrations of the run in this directory."""
    return run / run_files.SHOWN if config.warm_start.from_probe else run_files.prompts(run, run_files.DEMONSTRATIONS)


def read_demonstrations(path: Path) -> Demonstrations:
    """Read a file of demonstrations. Only the sizes are held in memory."""
    prompts, completions, trained = [np.zeros(0, np.int64)], [np.zeros(0, np.int64)], 0
    with pq.ParquetFile(path) as file:
        for batch in file.iter_batches():
            prompts.append(pc.list_value_length(batch["prompt_ids"]).to_numpy())
            completions.append(pc.list_value_length(batch["completion_ids"]).to_numpy())
            trained += pc.sum(batch["trained_tokens"].flatten()).as_py()
    completion = np.concatenate(completions)
    whole = np.concatenate(prompts) + completion
    longest, longest_completion = int(whole.max(initial=0)), int(completion.max(initial=0))
    return Demonstrations(FileRows(path), longest, longest_completion, float(whole.sum() / max(len(whole), 1)), trained)


def starting_model(config: RunConfig, run: Path) -> ModelConfig:
    """The keys of `[model]` that load what the training of the run in this directory begins with."""
    keys, folder = config.model, run / run_files.WARM_START
    if not config.warm_start.is_used:
        return keys
    if keys.use_peft:
        return keys.model_copy(update={"adapter": str(folder / run_files.ADAPTER)})
    return keys.model_copy(update={"name_or_path": str(folder / run_files.MODEL), "revision": None})
