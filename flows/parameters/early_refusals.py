"""Refuses configurations before a server is started or a stage begins, instead of minutes later in validate or plan."""

from __future__ import annotations

import glob
import os
from dataclasses import replace

from grpo_core import run_files
from grpo_core.config.run import RunConfig
from grpo_core.data import own_code
from grpo_core.data.processor import takes_images
from grpo_core.data.recording import check_recording
from grpo_core.environments.registry import sources
from grpo_core.errors import ConfigError
from grpo_core.planning.forecast import count_gpus
from grpo_core.planning.hardware import find_gpu
from grpo_core.planning.plan import Plan, make_plan, plan_inputs
from grpo_core.planning.shapes import ForecastError, config_file, load_positions
from grpo_core.planning.warm_start import plan_warm_start
from grpo_core.rewards.composition import check_curriculum
from grpo_core.rewards.contract import check, check_environments, rewards_of
from tasks.data.demonstrations import demonstration_source, load_demonstrations
from tasks.data.images.numbering import FEW, have_images, refusals
from tasks.data.path_or_hub import check_places
from tasks.data.rows import of_frame
from tasks.data.sources import SourceError, count_prompts, load_image_heads, needs_loading, training_sources
from tasks.processes.launchers.kubernetes_job import read_template
from tasks.processes.training_machine import check_training_machine
from tasks.publishing.formats import check_formats
from tasks.publishing.hub import check_hub
from tasks.stages.run_directory import run_folder, storage_root
from tasks.stages.table import GPU_DEPLOYMENT

ASSUMED_PROMPTS = 10**9  # if counting them would mean loading a dataset: no rule asks for more


def refuse_early(config: RunConfig, known_prompts: int | None = None, here: bool = True) -> Plan:
    """The one answer to "may this run start?", of every command, form and deployment. Returns the plan, provided that
    validate keeps all prompts.

    `known_prompts`: the number of prompts, of data that are elsewhere: neither they nor the model are looked for.
    `here`: this machine will train, so that it is tried too, and your own modules are imported; otherwise only what
    can be read in files counts.

    Raises ConfigError if model, prompts or recording do not exist, if vLLM would not find a model's weights, if a
    completion has no place in the model's positions, if prompts with images cannot be trained on in this way, if
    servers need more GPUs than there are, if launch.kubernetes is wrong, if a function that `[data]` names cannot be
    loaded, if a curriculum has no pass rates, or if an export could not be made or pushed; RewardError or
    EnvironmentsError if a reward, environment or tool cannot be loaded; SourceError if the training file cannot be
    read; PlanError if sizes do not fit together, whichever prompts validate keeps; MachineError if this machine should
    train on a GPU but cannot, or vLLM is not installed.
    """
    if here and not os.environ.get(GPU_DEPLOYMENT):
        check_training_machine(config)
        if (gpu := find_gpu()) and config.rollout.server_gpus:
            count_gpus(config, gpu)
        check_formats(config)
        check_hub(config)
    if known_prompts is None:
        check_places(config)
        if config.launch.launcher == "kubernetes":
            read_template(config.launch.kubernetes)
    _check_vllm_finds_weights(config)
    _check_positions(config)
    if known_prompts is None:
        _check_images(config)
    sources(config.environment)
    check_curriculum(config)
    if here:
        check_environments(rewards_of(config), config.environment.is_used)
        own_code.sources(config.data)
    else:
        for reward in config.rewards:
            check(reward)
        own_code.check(config.data)
    if known_prompts is None and config.warm_start.is_used:
        plan_warm_start(config, count_demonstrations(config))
    plan = make_plan(plan_inputs(config, *_num_prompts(config, known_prompts)))
    if known_prompts is None and config.rollout.engine == "recorded":
        # Only the stage plan knows how many batches an epoch takes, since validate may leave prompts out.
        certain = plan if config.train.max_steps else replace(plan, rollouts=1)
        check_recording(config, certain, run_folder(config.name))
    return plan


def count_demonstrations(config: RunConfig) -> int:
    """Number of demonstrations; of a probe's, the most there can be. Raises SourceError if they cannot be read, or lack
    a column."""
    if config.warm_start.from_probe:
        return sum(_num_prompts(config, None)) * config.data.curriculum.probe
    source = demonstration_source(config).data
    if needs_loading(source) and not run_files.is_run(source):
        return ASSUMED_PROMPTS
    return load_demonstrations(config).height


def _num_prompts(config: RunConfig, known: int | None) -> list[int]:
    """Number of prompts of each source of training prompts."""
    if known is None:
        asked = training_sources(config.data)
        return [ASSUMED_PROMPTS if needs_loading(source.data) else count_prompts(source) for source in asked]
    if config.data.sources:
        raise ConfigError("--num-prompts: each of data.sources has its own number of prompts; leave the option out")
    return [known]


def _check_positions(config: RunConfig) -> None:
    """Raises ConfigError if a completion alone fills the model's positions. Checked only if its config.json is on this
    machine."""
    positions = load_positions(config.model.name_or_path, config.model.revision)
    lengths = {
        "rollout.max_completion_length": config.rollout.max_completion_length,
        "evaluation.max_completion_length": config.evaluation_length,
    }
    for key, length in lengths.items():
        if positions is not None and length >= positions:
            raise ConfigError(
                f"{key} = {length}: the model {config.model.name_or_path!r} takes {positions} tokens, prompt included; "
                "lower it"
            )


def _check_images(config: RunConfig) -> None:
    """Raises ConfigError if the first prompts have images, and the configuration asks for what does not work with them.
    Looked for only if prompts and model are on this machine."""
    problems = [*refusals(config)]
    if not problems or own_code.named(config.data):
        return
    try:
        config_file(config.model.name_or_path, config.model.revision)
        heads = {str(place): of_frame(head) for place, head in enumerate(load_image_heads(config.data, FEW))}
        reads = have_images(heads) and takes_images(config.model)
    except (ForecastError, SourceError):  # said where they are needed
        return
    if reads:
        raise ConfigError("\n".join(problems))


def _check_vllm_finds_weights(config: RunConfig) -> None:
    """vLLM takes the path of a model's folder for a pattern."""
    places = {"model.name_or_path": config.model.name_or_path, "GRPO_STORAGE": str(storage_root())}
    for name, place in places.items():
        if config.rollout.engine == "vllm" and place != glob.escape(place):
            raise ConfigError(
                f"{name} = {place!r}: vLLM takes '[', '*' and '?' in a path for a pattern and would find no "
                "weights; use a folder without them, or rollout.engine = 'transformers'"
            )
