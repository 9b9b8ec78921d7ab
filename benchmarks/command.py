"""Shared by the benchmarks' commands: the options --tiny and --output, and the search path of further processes."""

from __future__ import annotations

import argparse
import os
from pathlib import Path

ROOT = Path(__file__).parents[1]
RESULTS = ROOT / "benchmarks" / "results"


def parse(parser: argparse.ArgumentParser, *, writes: bool = False) -> argparse.Namespace:
    """Parse the command line, which also takes --tiny and, if the benchmark `writes` results, --output."""
    parser.add_argument(
        "--tiny", action="store_true", help="cut down to seconds, to see that it runs: the figures say nothing"
    )
    if writes:
        parser.add_argument("--output", type=Path, metavar="FOLDER", help="default benchmarks/results")
    options = parser.parse_args()
    if writes:
        if options.tiny and options.output is None:
            parser.error("--tiny: give an --output, since its figures must not replace those in benchmarks/results")
        options.output = options.output or RESULTS
        options.output.mkdir(parents=True, exist_ok=True)
    return options


def python_path(*folders: Path) -> str:
    """PYTHONPATH with these folders first: on some machines, packages come by that variable."""
    before = os.environ.get("PYTHONPATH")
    return os.pathsep.join([*map(str, folders), *([before] if before else [])])
