"""Everything needed to continue exactly: weights, optimizer, reference policy, random states, and where the run stands.

A checkpoint is written beside its final name, while the training goes on, and renamed once it is on the disk, with a
checksum of each file: a killed run or a power cut leaves complete checkpoints or none. One that was damaged later is
recognised, and the one before it used.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import secrets
import shutil
import warnings
from collections.abc import Iterator
from concurrent.futures import Future
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator
from torch import Tensor, nn

from grpo_core import run_files
from grpo_core.config.run import RunConfig
from grpo_core.data.demonstrations import demonstrations_file
from grpo_core.data.images import beside
from grpo_core.distributed import (
    copy_into_shard,
    failing_together,
    from_main,
    gathered,
    read_tensors,
    shard_suffix,
    wait_for_all,
    write_tensors,
    writing_group,
)
from grpo_core.errors import GrpoError
from grpo_core.fingerprint import (
    batch_of,
    determining,
    environment_parts,
    planned_values,
    teacher_parts,
    warm_start_parts,
)
from grpo_core.model.loading import trainable_state
from grpo_core.model.policy import Policy
from grpo_core.model.sharded import is_sharded
from grpo_core.planning.plan import Plan
from grpo_core.planning.rules import division
from grpo_core.rewards.contract import source_of
from grpo_core.system.files import naming, replace_folder
from grpo_core.system.progress import CHECKPOINT, phase
from grpo_core.training.checkpoint_write import checksum, has_room_for_copy, in_host_memory, in_thread, write
from grpo_core.training.optimizer import AdamW8bit
from grpo_core.training.state import TrainingState, random_state, restored_state, saved_fields, set_random_state

MANIFEST = "manifest.json"
HEALTHY = "healthy"  # an empty file: the step from this checkpoint on went well


class CheckpointError(GrpoError):
    """Checkpoints that cannot be continued from, or written; the message says why and what to do."""

    exit_status = 1


def fingerprint(run: Path, config: RunConfig, plan: Plan, *, demonstrations: Path | None = None) -> str:
    """Hash of everything that a training depends on: plan, data, reward functions, configuration. A checkpoint is
    continued only under the same one. `demonstrations`: of a warm start, the file that it trains on."""
    sections = ["seed", "model", "rewards", "rollout", "algorithm", "train", "held_out"]
    found = determining(config)
    values = [found.get(section) for section in sections]
    optional = (environment_parts(config), config.data.chat_template_kwargs, config.source_rules, teacher_parts(config))
    values += [parts for parts in (*optional, warm_start_parts(config)) if parts]
    digest = hashlib.blake2b(json.dumps([values, planned_values(dataclasses.asdict(plan))], sort_keys=True).encode())
    for reward in config.rewards:
        digest.update(hashlib.blake2b(source_of(reward)).digest())
    names = ["train", "eval"] if config.train.eval_steps else ["train"]
    files = [demonstrations] if demonstrations else [run_files.prompts(run, name) for name in names]
    files += [demonstrations_file(config, run)] * config.warm_start.is_used
    files += [it.path for it in [beside(run_files.prompts(run, "train"))] if it and not demonstrations]
    if config.data.curriculum.kind != "none":
        digest.update(config.data.curriculum.model_dump_json().encode())
        files += [run / run_files.PROBED] * config.data.curriculum.begins_with_probe
    for file in files:
        with file.open("rb") as data:
            digest.update(hashlib.file_digest(data, "blake2b").digest())
    return digest.hexdigest()


def require_same_folder(folder: Path, accelerator: Accelerator) -> None:
    """Raises CheckpointError on every process unless all of them see the same `folder`, where checkpoints go."""
    if accelerator.num_processes == 1:
        return
    probe, token = folder / ".seen-by-all", secrets.token_hex(8)
    if accelerator.is_main_process:
        folder.mkdir(parents=True, exist_ok=True)
        probe.write_text(token)
    token = from_main(token)
    sees = gathered([probe.exists() and probe.read_text() == token])
    if accelerator.is_main_process:
        probe.unlink()
    if not all(sees):
        others = ", ".join(str(process) for process, there in enumerate(sees) if not there)
        raise CheckpointError(
            f"{folder} of process 0 is not what process {others} finds under that path. All processes write and read "
            "checkpoints: put the run directory on a disk that all machines share"
        )


@dataclass
class _Write:
    """A checkpoint that is being written."""

    state: TrainingState
    done: Future[None]
    healthy: bool = False  # whether to mark it when it is there


@dataclass
class Checkpoints:
    """Folder of a run's checkpoints, and the objects whose state they hold."""

    directory: Path
    fingerprint: str  # of what they belong to: configuration, plan, data, reward functions
    config: RunConfig
    accelerator: Accelerator
    model: nn.Module
    optimizer: torch.optim.Optimizer
    reference: Policy | None  # saved where it moves
    average: dict[str, Tensor] | None = None  # of the weights, if that teaches
    in_flight: _Write | None = field(default=None, init=False)
    newest: TrainingState | None = field(default=None, init=False)  # of those written since the start
    in_background: bool | None = field(default=None, init=False)  # how the last one was written

    @phase(CHECKPOINT)
    def save(self, state: TrainingState, keep: int, *, healthy: bool = False) -> None:
        """Begin to write `step-NNNNNN`; once it is there, all but the newest `keep` and the newest healthy one are
        dropped. Called by every process. Later changes are not in it: if the machine has no room for a copy, this
        returns when all is written.

        `healthy`: the weights are known to be healthy. If no step has used them yet, `confirm` marks them later.
        The generation batch goes with it: the next update may still read it, and its samples cannot be drawn again,
        since the policy that drew them is gone. Raises what `wait` raises for the checkpoint before this one.
        """
        self.wait()
        is_main, sharded = self.accelerator.is_main_process, is_sharded(self.model)
        tensors = self._tensors() if is_main or sharded else {}
        background, why = has_room_for_copy(tensors)
        if is_main and background != self.in_background:
            with suppress(BrokenPipeError):  # if what reads the output has died, this checkpoint is the last one
                print(f"training: {why}", flush=True)
        self.in_background = background
        if background:
            tensors = in_host_memory(tensors)
        random, fields = random_state(), saved_fields(state)
        final, group = self._folder(state.updates), writing_group()
        temporary = final.with_suffix(".tmp")

        def work() -> None:
            with failing_together(group):
                temporary.mkdir(parents=True, exist_ok=True)
                write(random, temporary / f"random-{self.accelerator.process_index}.pt")
                if is_main:
                    write({**({} if sharded else tensors), "state": fields}, temporary / "state.pt")
            if sharded:
                write_tensors(tensors, temporary, group)
            with failing_together(group):
                if is_main:
                    with naming(temporary):
                        self._publish(temporary, final, state.best_step, healthy)
                    self._prune(keep)

        if background:
            self.in_flight = _Write(state, in_thread(work))
        else:
            work()
            self.newest = state

    def save_last(self, state: TrainingState, keep: int) -> None:
        """Save a training that ends early, and wait until it is on the disk. Called by every process."""
        try:
            self.wait()
        except OSError as error:
            warnings.warn(f"an earlier checkpoint is not written: {error}", stacklevel=2)
        if state is not self.newest:
            self.save(state, keep)
            self.wait()

    @phase(CHECKPOINT)
    def wait(self) -> None:
        """Wait until the last checkpoint is on the disk. Called by every process. Raises OSError, which names the file,
        on every process if it could not be written; the checkpoints before it stay."""
        written, self.in_flight = self.in_flight, None
        if written is not None:
            written.done.result()
            self.newest = written.state
            if written.healthy:
                self.confirm(written.state.updates)

    @contextmanager
    def finished(self) -> Iterator[None]:
        """Wait for the last checkpoint when the block ends, also by an error."""
        try:
            yield
        except BaseException:
            try:
                self.wait()
            except Exception as error:
                warnings.warn(f"the last checkpoint is not written: {error}", stacklevel=2)
            raise
        self.wait()

    def confirm(self, step: int) -> None:
        """Mark the checkpoint of `step`, if there is one, as healthy. Called by every process."""
        if self.in_flight is not None and self.in_flight.state.updates == step:
            self.in_flight.healthy = True
        elif self.accelerator.is_main_process and self._folder(step).exists():
            (self._folder(step) / HEALTHY).touch()

    @phase(CHECKPOINT)
    def restore(self, *, healthy: bool = False) -> TrainingState | None:
        """Load the newest undamaged (and `healthy`) checkpoint, and drop those after it. Returns None without one.

        A damaged one is set aside as `step-NNNNNN.damaged` with a warning. Raises CheckpointError if a damaged one is
        all that is left, or if one was written under another configuration, with other data or reward functions, or by
        a version that keeps other fields.
        """
        self.wait()
        folder = from_main(self._newest(healthy) if self.accelerator.is_main_process else None)
        if folder is None:
            return None
        # Mapped: the processes of a machine read the same pages, and none holds the whole.
        content = torch.load(folder / "state.pt", weights_only=True, map_location="cpu", mmap=True)
        if "model" in content:
            tensors = self._tensors()
            _copy({name: content[name] for name in tensors}, tensors)
        else:
            read_tensors(self._tensors(), folder)
        if self.reference is not None:
            self.reference.refresh()
        random = folder / f"random-{self.accelerator.process_index}.pt"
        if random.exists():  # else there are more processes now
            set_random_state(torch.load(random, weights_only=True))
        try:
            state = restored_state(content["state"])
        except (KeyError, TypeError) as error:
            raise CheckpointError(
                f"{folder} was written by a version of this project that keeps other fields ({error}): continue with "
                f"that one, or move {self.directory.parent} away to start from the beginning"
            ) from error
        wait_for_all()
        return state

    def _tensors(self) -> dict[str, Any]:
        """Return all tensors that a training changes, by name: weights, the optimizer's moments, a moving reference,
        the average of the weights."""
        names: dict[Tensor, str] = {parameter: name for name, parameter in self.model.named_parameters()}
        # Moments of 8 bits are no DTensors: those of each shard have their own names.
        apart = isinstance(self.optimizer, AdamW8bit)
        state = self.optimizer.state
        moments = {names[parameter] + shard_suffix(parameter) * apart: values for parameter, values in state.items()}
        reference = {} if self.reference is None else dict(self.reference.master.named_parameters())
        found = {"model": trainable_state(self.model), "optimizer": moments, "reference": reference}
        return found if self.average is None else {**found, "average": self.average}

    def best_steps(self) -> set[int]:
        """Steps that any checkpoint names as its best: their policies must be kept."""
        steps = [_manifest(folder).get("best_step") for folder in self._all()]
        steps.append(self.in_flight and self.in_flight.state.best_step)
        return {step for step in steps if step is not None}

    def _publish(self, temporary: Path, final: Path, best_step: int | None, healthy: bool) -> None:
        """Complete the files in the folder `temporary`, and put it where checkpoints are looked for."""
        manifest = {
            "fingerprint": self.fingerprint,
            "batch": batch_of(self.config),
            "best_step": best_step,
            "checksums": {path.name: checksum(path) for path in sorted(temporary.iterdir())},
        }
        (temporary / MANIFEST).write_text(json.dumps(manifest, indent=2) + "\n")
        if healthy or (final / HEALTHY).exists():  # written again, of the same weights
            (temporary / HEALTHY).touch()
        replace_folder(temporary, final)

    def _newest(self, healthy: bool) -> Path | None:
        for replaced in self.directory.glob("*.old"):
            if replaced.with_suffix("").exists():
                shutil.rmtree(replaced)
            else:  # killed between the two renames of `replace_folder`
                replaced.rename(replaced.with_suffix(""))
        for left_over in self.directory.glob("*.tmp"):
            shutil.rmtree(left_over)
        unhealthy: list[Path] = []
        for folder in reversed(self._all()):
            problem = _damage(folder)
            if problem:
                aside = folder.with_suffix(".damaged")
                if aside.exists():
                    shutil.rmtree(aside)
                folder.rename(aside)
                warnings.warn(f"checkpoint {folder} is damaged ({problem}): the one before it is used", stacklevel=2)
                continue
            manifest = _manifest(folder)
            if manifest["fingerprint"] != self.fingerprint:
                if (batch := manifest.get("batch")) and batch != batch_of(self.config):
                    raise CheckpointError(_other_batch(folder, batch, self.config))
                raise CheckpointError(
                    f"{folder} was written under another configuration or plan, with other data or other reward "
                    "functions, or in another precision (train.mixed_precision = 'auto' is bf16 on a GPU, float32 on a "
                    f"CPU); move {self.directory.parent} away to start from the beginning, or restore what it was to "
                    "continue it"
                )
            if not healthy or (folder / HEALTHY).exists():
                for later in unhealthy:
                    _remove(later)
                return folder
            unhealthy.append(folder)
        damaged = sorted(path.name for path in self.directory.glob("*.damaged"))
        if damaged and not unhealthy:
            raise CheckpointError(
                f"no undamaged checkpoint is left in {self.directory}, only {', '.join(damaged)}. Put a good copy of "
                "one back, without .damaged in its name; or, to train from the beginning, remove them"
            )
        return None

    def _prune(self, keep: int) -> None:
        folders = [folder for folder in self._all() if _manifest(folder)]
        healthy = [f for f in folders if (f / HEALTHY).exists()]
        for folder in set(self._all()) - {*folders[-keep:], *healthy[-1:]}:
            _remove(folder)

    def _folder(self, step: int) -> Path:
        return self.directory / f"step-{step:06d}"

    def _all(self) -> list[Path]:
        return sorted(path for path in self.directory.glob("step-*") if not path.suffix)


@torch.no_grad()
def _copy(saved: dict[str, Any], own: dict[str, Any]) -> None:
    """Copy saved tensors into those of the same names; `load_state_dict` would put an optimizer's there twice."""
    if own.keys() != saved.keys():
        raise ValueError(f"the saved state has other tensors: {sorted(own.keys() ^ saved.keys())[:5]}")
    for name, value in own.items():
        if isinstance(value, Tensor):
            copy_into_shard(saved[name], value)
        else:
            _copy(saved[name], value)


def _other_batch(folder: Path, batch: dict[str, int], config: RunConfig) -> str:
    """Sentence on a checkpoint of another batch, with the keys that keep it."""
    processes = config.train.num_processes
    keys = division(batch, processes, config.train.per_device_train_batch_size)
    way_out = f"no values divide that batch among train.num_processes={processes}; take another number"
    if keys is not None:
        way_out = f"with train.num_processes={processes}, set " + ", ".join(f"{key}={n}" for key, n in keys.items())
    return (
        f"{folder} was written with {_batch_in_words(batch)}; this configuration has "
        f"{_batch_in_words(batch_of(config))}. A training goes on with the same batch: {way_out}; to train with "
        f"another one, move {folder.parents[1]} away"
    )


def _batch_in_words(batch: dict[str, int]) -> str:
    return ", ".join(f"{key.replace('_', ' ')}: {value}" for key, value in batch.items())


def _manifest(folder: Path) -> dict[str, Any]:
    """Content of the manifest; empty if it cannot be read."""
    try:
        manifest = json.loads((folder / MANIFEST).read_text())
    except (OSError, ValueError):
        return {}
    return manifest if isinstance(manifest, dict) and isinstance(manifest.get("checksums"), dict) else {}


def _damage(folder: Path) -> str | None:
    """Sentence on what is wrong with a checkpoint's files; None if they are as they were written."""
    manifest = _manifest(folder)
    if not manifest:
        return f"{MANIFEST} cannot be read"
    for name, expected in manifest["checksums"].items():
        if not (folder / name).exists():
            return f"{name} is missing"
        if checksum(folder / name) != expected:
            return f"{name} is not what was written"
    return None


def _remove(folder: Path) -> None:
    """Rename, then delete: a process killed in between must not leave half a checkpoint that looks whole."""
    temporary = folder.with_suffix(".tmp")
    folder.rename(temporary)
    shutil.rmtree(temporary)
