"""Measures whether sampling ahead is faster, and whether it learns as well.

    python -m benchmarks.staleness --simulate     # updates per hour over max_staleness; JSON and a picture
    python -m benchmarks.staleness --real         # real trainings and a vLLM server on this CPU, beside the simulation
    python -m benchmarks.staleness --learn quickstart maths   # held-out reward by max_staleness and seed

Writes into benchmarks/results. On two cores, `--simulate` takes half a minute, `--real` about ten minutes, and
`--learn` a minute or two per recipe, seed and `max_staleness`.
"""

from __future__ import annotations

import argparse
import json
import random
from collections.abc import Callable
from pathlib import Path
from statistics import mean
from typing import Any

from benchmarks.command import parse
from grpo_core.planning.sampling_ahead import Group, Speed, simulate

AHEAD = range(9)
GROUP, PROMPTS, BATCHES = 8, 32, 40
SLOTS = 256
SERVERS = (1, 2, 4)
# Assumed, not measured: roughly a model of 7 billion parameters on one GPU per server, and 30 s per update.
SPEED = Speed(step=0.012, sequence=0.00005, prefill=0.00004, hand_over=2.0, update=30.0)


def short(draw: random.Random) -> list[tuple[int, float]]:
    """Draw a log-normal length: median 120 tokens, hardly any tail."""
    return [(min(1 + int(draw.lognormvariate(4.8, 0.4)), 512), 0.0)]


def tailed(draw: random.Random) -> list[tuple[int, float]]:
    """Draw a log-normal length: median 500 tokens, cut off at 8,192."""
    return [(min(1 + int(draw.lognormvariate(6.2, 1.0)), 8192), 0.0)]


def talking(draw: random.Random) -> list[tuple[int, float]]:
    """Draw a conversation of 1 to 5 turns; a tool takes 2 s in the median, and sometimes a minute."""
    return [(20 + int(draw.expovariate(1 / 100)), draw.lognormvariate(0.7, 1.2)) for _ in range(draw.randint(1, 5))]


LENGTHS: dict[str, Callable[[random.Random], list[tuple[int, float]]]] = {
    "short": short,
    "long tail": tailed,
    "tool waits": talking,
}


def main() -> None:
    parser = argparse.ArgumentParser(description=str(__doc__).partition("\n")[0])
    what = parser.add_mutually_exclusive_group(required=True)
    what.add_argument("--simulate", action="store_true", help="writes staleness-simulated.json and .png")
    what.add_argument(
        "--real", action="store_true", help="writes staleness-real.json, or staleness-real-2-servers.json"
    )
    what.add_argument("--learn", nargs="+", metavar="RECIPE", help="writes staleness-learning.json and .png")
    parser.add_argument("--ahead", type=int, nargs="+", default=[0, 1, 2, 4], help="max_staleness; default 0 1 2 4")
    parser.add_argument("--updates", type=int, help="per training; default 12 with --real, else the recipe's")
    parser.add_argument("--seeds", type=int, default=3, help="--learn; default 3")
    parser.add_argument("--judge-seconds", type=float, default=2.0, help="--real: of the reward; default 2")
    parser.add_argument("--servers", type=int, default=1, help="--real; default 1")
    options = parse(parser, writes=True)
    if options.simulate:
        document = simulated(1 if options.tiny else BATCHES)
        draw(document, options.output / "staleness-simulated.png")
        write("simulated", document, options.output)
    elif options.real:
        from benchmarks.staleness_real import measure

        name = f"real-{options.servers}-servers" if options.servers > 1 else "real"
        updates = options.updates or 12
        document = measure(options.ahead, updates, options.judge_seconds, options.servers, options.tiny)
        write(name, document, options.output)
    else:
        from benchmarks.staleness_learning import learn

        for document in learn(options.learn, options.ahead, options.seeds, options.updates):
            write("learning", document, options.output)
            draw_learning(document, options.output / "staleness-learning.png")


def write(name: str, document: dict[str, Any], folder: Path) -> None:
    (folder / f"staleness-{name}.json").write_text(json.dumps(document, indent=1) + "\n")


def simulated(batches: int) -> dict[str, Any]:
    """Simulate updates per hour, waiting and staleness for each distribution of lengths, number of servers and
    max_staleness."""
    found = []
    for name, length in LENGTHS.items():
        source = random.Random(0)
        groups: list[Group] = [[length(source) for _ in range(GROUP)] for _ in range(PROMPTS * batches)]
        for servers in SERVERS:
            for most in AHEAD:
                run = simulate(groups, PROMPTS, most, servers, SLOTS, SPEED, prompt_tokens=200)
                found.append(
                    {
                        "lengths": name,
                        "servers": servers,
                        "max_staleness": most,
                        "updates_per_hour": round(run.batches_per_hour, 2),
                        "waiting_share": round(run.waiting_share, 4),
                        "mean_staleness": round(run.mean_staleness, 3),
                        "oldest_group": run.max_staleness,
                    }
                )
    assumed = {"speed": vars(SPEED), "prompts": PROMPTS, "completions_per_prompt": GROUP, "batches": batches}
    return {"assumed": assumed | {"slots": SLOTS}, "simulated": found}


def draw(document: dict[str, Any], path: Path) -> None:
    """Draw one panel per distribution of lengths: updates per hour over max_staleness, one line per number of
    servers."""
    import matplotlib

    matplotlib.use("agg")
    from matplotlib import pyplot

    figure, panels = pyplot.subplots(1, len(LENGTHS), figsize=(9, 3), layout="constrained")
    for axes, name in zip(panels, LENGTHS, strict=True):
        for servers, colour in zip(SERVERS, ("#b8c4d6", "#7596c4", "#2f5d9b"), strict=True):
            rows = [row for row in document["simulated"] if (row["lengths"], row["servers"]) == (name, servers)]
            label = f"{servers} server{'s' * (servers > 1)}"
            paces = [row["updates_per_hour"] for row in rows]
            axes.plot([row["max_staleness"] for row in rows], paces, marker="o", color=colour, label=label)
        most = max(row["updates_per_hour"] for row in document["simulated"] if row["lengths"] == name)
        axes.set(title=name, xlabel="max_staleness", ylim=(0, 1.1 * most))
        axes.spines[["top", "right"]].set_visible(False)
    panels[0].set_ylabel("updates per hour, simulated")
    panels[0].legend(frameon=False, loc="lower right")
    figure.savefig(path, dpi=110)
    pyplot.close(figure)


def draw_learning(document: dict[str, Any], path: Path) -> None:
    """Draw one panel per recipe: held-out reward over the samples trained on, one colour per max_staleness; each seed
    is a thin line, their mean a thick one."""
    import matplotlib

    matplotlib.use("agg")
    from matplotlib import pyplot

    trainings = document["trainings"]
    recipes = [*dict.fromkeys(each["recipe"] for each in trainings)]
    figure, panels = pyplot.subplots(1, len(recipes), figsize=(9, 3), layout="constrained", squeeze=False)
    for axes, recipe in zip(panels[0], recipes, strict=True):
        most = sorted({each["max_staleness"] for each in trainings if each["recipe"] == recipe})
        for number, colour in zip(most, ("#222222", "#7596c4", "#5b9f6e", "#c4642f"), strict=False):
            curves = [
                each["curve"] for each in trainings if (each["recipe"], each["max_staleness"]) == (recipe, number)
            ]
            for curve in curves:
                axes.plot(*zip(*curve, strict=True), color=colour, linewidth=0.5, alpha=0.35)
            samples = [samples for samples, _ in curves[0]]
            means = [mean(rewards) for rewards in zip(*([it[1] for it in curve] for curve in curves), strict=True)]
            axes.plot(samples, means, color=colour, linewidth=2, label=str(number))
        axes.set(title=recipe, xlabel="samples trained on")
        axes.xaxis.set_major_locator(pyplot.MaxNLocator(4))
        axes.spines[["top", "right"]].set_visible(False)
    panels[0][0].set_ylabel("held-out reward")
    panels[0][-1].legend(title="max_staleness", frameon=False, loc="lower right")
    figure.savefig(path, dpi=110)
    pyplot.close(figure)


if __name__ == "__main__":
    main()
