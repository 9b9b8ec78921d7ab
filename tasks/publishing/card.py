"""The model card of an export, written from the run's record: README.md with the hub's metadata."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from grpo_core.config.evaluation import HELD_OUT
from grpo_core.config.run import RunConfig
from grpo_core.data.chat import is_conversation
from tasks.data.path_or_hub import data_set, may_be_on_the_hub
from tasks.data.sources import sources_of
from tasks.registry.answering import answering_of
from tasks.rendering.markdown import table
from tasks.reports.record import Record, read_record
from tasks.reports.report import headline, rows_of
from tasks.stages.files import write_text

LICENCE = ("license", "license_name", "license_link")  # keys of a card's metadata


def write_card(
    file: Path, run: Path, config: RunConfig, export: Mapping[str, Any], commit: str, repository: str
) -> None:
    """Write the card. `export`: its verdict, and its figures unless it is the trained policy's own files; `commit`: of
    the code that the run was trained with, "" if unknown; `repository`: of the hub, "" if none."""
    from huggingface_hub import EvalResult, ModelCardData

    record, licence = read_record(run, config), _licence_of_base(config)
    metric, own = record.metric, export["sets"].get(HELD_OUT)
    trained = record.evaluation["sets"][HELD_OUT]["policies"]["trained"][metric]["mean"]
    base, data = config.model.name_or_path, [each.data for each in sources_of(config).values()]
    result = EvalResult(
        task_type="text-generation",
        dataset_type=", ".join(_shown(origin.eval) for origin in config.data.origins.values()),
        dataset_name=HELD_OUT,
        metric_type=metric,
        metric_value=round(own["exported"] if own else trained, 4),
    )
    metadata = ModelCardData(
        base_model=base if _is_on_hub(base) else None,
        datasets=[*dict.fromkeys(filter(_is_on_hub, data))] or None,
        library_name="transformers",
        pipeline_tag="text-generation",
        tags=["grpo", "reinforcement-learning"],
        model_name=config.name,
        eval_results=[result],
        **licence,
    )
    parts = [f"# {config.name}", *_parts(record, export["verdict"], commit, licence), _usage(record, repository)]
    write_text(file, f"---\n{metadata.to_yaml()}\n---\n\n" + "\n\n".join(parts) + "\n")


def _parts(record: Record, export: str, commit: str, licence: dict[str, Any]) -> Iterator[str]:
    config, evaluation = record.config, record.evaluation
    found = headline(evaluation, record.metric)
    yield f"`{_shown(config.model.name_or_path)}`, trained with GRPO. **{found.headline}.** {found.sentence}"
    yield f"This export is {export}."
    yield "## Evaluation\n\n" + table(rows_of(evaluation["sets"][HELD_OUT]))
    evaluated, stop = config.evaluation, config.rollout.stop
    how = f"at temperature {evaluated.temperature:g}" if evaluated.temperature else "greedily"
    until = f", up to one of {stop}" if stop else ""
    yield f"Sampled {how}, {evaluated.num_samples} per prompt, at most {config.evaluation_length} tokens{until}."
    counts = record.data["num_prompts"]
    places = [
        [part, _shown(each.data), each.split or "", f"{counts[data_set(part)]:,}"]
        for part, each in sources_of(config).items()
    ]
    yield "## Data\n\n" + table([["part", "from", "split", "prompts of the set"], *places])
    scored = [[it.name, it.function, f"{it.weight:g}"] for it in config.rewards]
    yield "## Rewards\n\n" + table([["reward", "function", "weight"], *scored])
    made = [
        ["base model", _shown(config.model.name_or_path)],
        ["revision of the base", config.model.revision or ""],
        ["licence of the base", licence.get("license_name") or licence.get("license") or "not stated"],
        ["updates", f"{record.result['counted']['updates']:,}"],
        ["commit of the code", commit],
        ["hardware", record.hardware],
        *map(list, record.cost.rows()),
    ]
    yield "## Training\n\n" + table([["", ""], *(row for row in made if row[1])])


def _usage(record: Record, repository: str) -> str:
    config, talks = record.config, is_conversation(record.samples["prompt"][0])
    answering = answering_of(config, conversational=talks, tools=None)
    sampling = {name: value for name, value in answering.sampling.items() if name != "stop"}
    if not sampling["temperature"]:
        sampling = {"max_new_tokens": sampling["max_new_tokens"]}
    sampling |= {"do_sample": "temperature" in sampling}
    sampling |= {"stop_strings": config.rollout.stop} if config.rollout.stop else {}
    system = answering.settings["system_prompt"]
    messages = [f"{{'role': 'system', 'content': {system!r}}}"] * bool(system)
    messages.append("{'role': 'user', 'content': prompt}")
    options = ["add_generation_prompt=True", "return_dict=True", 'return_tensors="pt"']
    chat = [f"[{', '.join(messages)}]", *options, *_given(config.data.chat_template_kwargs)]
    encode = f"tokenizer.apply_chat_template({', '.join(chat)})" if talks else 'tokenizer(prompt, return_tensors="pt")'
    names = [*config.environment.factories, *config.environment.tools]
    left_out = (
        f"It was trained and evaluated with {', '.join(names)}, which these lines leave out.\n\n" if names else ""
    )
    return f"""## Use

{left_out}```python
from transformers import AutoModelForCausalLM, AutoTokenizer

place = {(repository or "path/to/this/folder")!r}
prompt = "…"
tokenizer = AutoTokenizer.from_pretrained(place)
model = AutoModelForCausalLM.from_pretrained(place, dtype="auto")
inputs = {encode}
answer = model.generate(**inputs, tokenizer=tokenizer, {", ".join(_given(sampling))})
print(tokenizer.decode(answer[0, inputs["input_ids"].shape[1] :], skip_special_tokens=True))
```"""


def _given(arguments: Mapping[str, Any]) -> list[str]:
    return [f"{name}={value!r}" for name, value in arguments.items()]


def _licence_of_base(config: RunConfig) -> dict[str, Any]:
    """What the base's own card says of its licence; empty if it has none, or the hub does not answer."""
    from huggingface_hub import ModelCard, hf_hub_download

    file = Path(base := config.model.name_or_path, "README.md")
    if _is_on_hub(base):
        try:
            file = Path(hf_hub_download(base, file.name, revision=config.model.revision))
        except OSError:  # the repository has none, or the hub does not answer
            return {}
    if not file.is_file():
        return {}
    said = ModelCard.load(file, ignore_metadata_errors=True).data.to_dict()
    return {key: str(said[key]) for key in LICENCE if said.get(key)}


def _shown(place: str) -> str:
    """A name on the hub, or the last part of a path: a card shows no folders of this machine."""
    return place if _is_on_hub(place) else Path(place).name


def _is_on_hub(place: str) -> bool:
    return not Path(place).exists() and may_be_on_the_hub(place)
