"""Five held-out prompts of a finished run, and what the base and the trained policy answered."""

from __future__ import annotations

import argparse
from pathlib import Path

PROMPTS = 5


def main() -> None:
    import polars as pl

    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("run", type=Path, nargs="?", default=Path("storage", "runs", "smollm"), help="the run's folder")
    samples = parser.parse_args().run / "evaluation" / "samples.parquet"
    if not samples.is_file():
        raise SystemExit(f"{samples} is not there: the run has not been evaluated yet")
    for row in pl.read_parquet(samples.read_bytes()).filter(set="held-out", sample=0).head(PROMPTS).to_dicts():
        print(f"\n{row['prompt'][-1]['content']}  (right: {row['answer']})")
        for policy in ("base", "trained"):
            print(f"  {policy:8}{row[f'{policy}/completion']!r}")


if __name__ == "__main__":
    main()
