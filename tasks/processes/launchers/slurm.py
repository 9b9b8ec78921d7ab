"""Machines that Slurm gives, by its own commands: sbatch, scontrol and scancel."""

from __future__ import annotations

import re
import shlex
import subprocess
from collections.abc import Sequence
from pathlib import Path

from grpo_core.config.run import RunConfig
from tasks.processes.launchers.batch import Job, Scheduler, SchedulerError, batch

COMMAND_SECONDS = 30.0
# One task per node, with all of the job's resources there. A task that fails does not end the others: they save first.
SCRIPT = r"""#!/bin/sh
exec srun --ntasks-per-node=1 --kill-on-bad-exit=0 --wait=0 --mpi=none --cpu-bind=none --input=none --export=ALL \
    {command}
"""
# Variables that a job starts with. All others come with the request, since Slurm stores a job's environment.
VARIABLES = "HOME,LANG,LD_LIBRARY_PATH,LOGNAME,PATH,SHELL,USER"
WAITING = {"CONFIGURING", "PENDING", "REQUEUED", "REQUEUE_FED", "REQUEUE_HOLD", "RESV_DEL_HOLD", "SPECIAL_EXIT"}
RUNNING = {"COMPLETING", "RESIZING", "RUNNING", "SIGNALING", "STAGE_OUT", "STOPPED", "SUSPENDED"}
TAKEN = {"BOOT_FAIL", "DEADLINE", "NODE_FAIL", "PREEMPTED", "TIMEOUT"}
UNKNOWN = "Invalid job id"


def submit(config: RunConfig, command: list[str], folder: Path) -> str:
    options = {
        "nodes": config.num_machines,
        "ntasks-per-node": 1,
        "job-name": f"grpo-{config.name}",
        "chdir": str(Path.cwd()),
        "output": str(folder / "job.log").replace("%", "%%"),
        "export": VARIABLES,
    }
    ours = [f"--{name}={value}" for name, value in options.items()]
    script = SCRIPT.format(command=shlex.join(command))
    printed = _run(["sbatch", "--parsable", "--no-requeue", *ours, *config.launch.slurm], script)
    return printed.strip().partition(";")[0]


def look(job: str) -> Job:
    try:
        shown = _run(["scontrol", "show", "job", job, "--oneliner"])
    except SchedulerError as error:
        if UNKNOWN in str(error):  # Slurm forgets jobs minutes after their end
            return Job("ended", "Slurm no longer knows it")
        raise
    return parse_job(shown)


def parse_job(shown: str) -> Job:
    """Read a job's state from the line that `scontrol show job` prints."""
    found = dict(re.findall(r"\b(JobState|Reason|NodeList|PreemptTime)=(\S+)", shown))
    state, preempted = found["JobState"], found.get("PreemptTime", "None") != "None"
    notes = [found["Reason"]] * (found["Reason"] != "None") + ["pre-empted"] * preempted
    reason = ", ".join([state, *notes])
    if state in WAITING:
        return Job("waiting", reason)
    if state in RUNNING:
        return Job("running", f"{state} on {found['NodeList']}")
    if state == "CANCELLED":
        return Job("ended", reason, "person")
    # If a pre-empted job ends within its grace time, its state follows from its own exit status.
    return Job("ended", reason, "scheduler" if preempted or state in TAKEN else "itself")


def cancel(job: str) -> None:
    _run(["scancel", "--quiet", job])


def _run(command: Sequence[str], script: str = "") -> str:
    """Run one of Slurm's commands and return its output."""
    try:
        done = subprocess.run(command, input=script, capture_output=True, text=True, timeout=COMMAND_SECONDS)
    except FileNotFoundError:
        raise SchedulerError(
            f"the command {command[0]} is missing: launch.launcher='slurm' needs Slurm's commands on the machine that "
            "runs the stage, for example a login node"
        ) from None
    except subprocess.TimeoutExpired:
        raise SchedulerError(f"Slurm: {command[0]} has not answered within {COMMAND_SECONDS:g} s") from None
    if done.returncode:
        raise SchedulerError(f"Slurm: {done.stderr.strip() or f'{command[0]} ended with status {done.returncode}'}")
    return done.stdout


slurm = batch(Scheduler("Slurm", submit, look, cancel))
