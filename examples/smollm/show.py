"""Five held-out prompts of the run that was evaluated last, and what the base and the trained policy answered."""

from __future__ import annotations

import os
from pathlib import Path

RUNS = Path(os.environ.get("GRPO_STORAGE", "storage"), "runs")
PROMPTS = 5


def main() -> None:
    from grpo_core.system.tables import read_parquet

    samples = max(RUNS.glob("*/evaluation/samples.parquet"), key=lambda file: file.stat().st_mtime, default=None)
    if samples is None:
        raise SystemExit(f"no run in {RUNS} has been evaluated yet: grpo run configs/smollm.toml")
    for row in read_parquet(samples).filter(set="held-out", sample=0).head(PROMPTS).to_dicts():
        print(f"\n{row['prompt'][-1]['content']}  (right: {row['answer']})")
        for policy in ("base", "trained"):
            print(f"  {policy:8}{row[f'{policy}/completion']!r}")


if __name__ == "__main__":
    main()
