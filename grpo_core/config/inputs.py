"""`[model]`, `[data]` and `[[rewards]]`: what a run starts from.

Here and in all sections, keys that mean the same as in TRL's GRPOConfig carry TRL's names.
"""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from pathlib import PurePath
from typing import Annotated, Any, Literal

from pydantic import Field, field_validator, model_validator

from grpo_core.config.base import LONGEST_SECONDS, MOST_GIB, Section
from grpo_core.config.columns import columns_read, is_function, is_template
from grpo_core.config.functions import framework_of, own_name

LONGEST_ARGUMENT = 200  # characters: MLflow takes names of parameters up to 250, with rewards.0.args. in front
MOST_PIXELS = 2**26  # of an image; Pillow itself warns from 1.3 times as many
WIDEST_RANGE = 1e12  # of a reward
# Arguments of transformers' apply_chat_template that are not variables of the template.
NO_VARIABLES = {
    "conversation", "tools", "chat_template", "add_generation_prompt", "continue_final_message", "tokenize", "padding",
    "truncation", "max_length", "return_tensors", "return_dict", "return_assistant_tokens_mask", "tokenizer_kwargs",
    "messages",
}  # fmt: skip


Bounds = Annotated[tuple[float, float], Field(strict=False)]  # a list in TOML


class ModelConfig(Section):
    name_or_path: str
    """Hugging Face model folder or hub name of the base model."""
    revision: str | None = None
    """Hub revision (branch, tag or commit); only for hub names."""
    gguf_file: str | None = Field(None, pattern=r"\.gguf$")
    """GGUF file in that folder or repository, which holds the base model with its tokenizer, chat template and end
    tokens. It is made an ordinary checkpoint in float32, once per storage, and what is trained is saved as one."""
    use_peft: bool = False
    """Train a LoRA adapter (arXiv:2106.09685) and leave the base model as it is."""
    adapter: str | None = None
    """Folder of an adapter to continue with, as peft saves it (an earlier run's training/adapter); default: a new one.
    The base with it is the reference policy, and what evaluations compare with."""
    lora_r: int = Field(16, ge=1)
    """Rank of the adapter."""
    lora_alpha: int = Field(32, ge=1)
    """The adapter's change is scaled by lora_alpha / lora_r."""
    use_rslora: bool = False
    """Scale the adapter's change by lora_alpha / √lora_r instead (rsLoRA, arXiv:2312.03732): large ranks then learn as
    fast as small ones."""
    lora_dropout: float = Field(0.0, ge=0, lt=1)
    """Share of an adapter's inputs that is left out at random in the passes that give gradients. Sampling, ratios, KL
    and metrics are those of the policy without dropout, for which each update computes one forward pass more."""
    lora_target_modules: list[str] | None = Field(None, min_length=1)
    """Names of the linear layers that get an adapter; default: all except the output layer, as peft's `all-linear`
    finds them (in some mixtures of experts without the experts and the router). Only those of the text model, and none
    whose weights are tied to another module's."""
    lora_modules_to_save: list[str] | None = Field(None, min_length=1)
    """Modules that are trained whole beside the adapter and saved with it, such as `["embed_tokens", "lm_head"]`: every
    module whose name ends in one of these. An embedding that is tied to the head stays tied: either name trains both.
    vLLM takes no such module beside its own base, so it gets whole weights after each update."""

    load_in_4bit: bool = False
    """Hold the frozen base in 4 bits (QLoRA, arXiv:2305.14314): nf4 with double quantisation, by bitsandbytes. The
    adapter is sampled and trained over these weights; the saved model is the adapter merged, in float32, into the
    weights that the 4 bits stand for. Saves memory with the transformers engine and with servers: vLLM in the training
    process shares its base with the training only if that is not in 4 bits."""
    freeze_vision_tower: bool = True
    """If the data have images: train only the language model and its output layer, and leave all that is beside them,
    the vision tower and its projection, as it is."""

    @model_validator(mode="after")
    def _adapter_keys_need_an_adapter(self) -> ModelConfig:
        for key in ("adapter", "use_rslora", "lora_dropout", "lora_modules_to_save", "load_in_4bit"):
            if getattr(self, key) and not self.use_peft:
                raise ValueError(f"{key}={getattr(self, key)!r} is for an adapter; set use_peft = true, or remove it")
        return self


Severity = Literal["error", "drop", "warn"]
Refusal = Literal["error", "drop"]  # for rows on which no model can be trained


class DataChecks(Section):
    """What to do with a row that breaks a rule: `error` refuses the data, `drop` leaves the row out and writes it to
    dataset/NAME.dropped.parquet, `warn` keeps it and reports it."""

    blank_prompt: Refusal = "error"
    """A prompt that is missing, empty or only white space."""
    malformed_conversation: Refusal = "error"
    """Messages with another role than system, user, assistant or tool, or without text; a system message that is not
    the first; a last message that is neither the user's nor a tool's; another number of images than places for one."""
    chat_template: Refusal = "error"
    """A conversation that the model's chat template refuses, because of its roles or of what a message says, or makes
    no text of, or leaves something out of that system, user or tools say."""
    no_tokens: Refusal = "error"
    """A prompt, or a last message, that the tokenizer turns into no token: its vocabulary has none of the
    characters."""
    broken_image: Refusal = "error"
    """An image that cannot be opened: no file, another format than PNG, JPEG, WebP, GIF, BMP and TIFF, a damaged or
    animated one, an address in the web, more pixels than data.max_image_pixels, or a size that the model's processor
    refuses."""
    too_many_images: Refusal = "error"
    """A prompt with more images than data.max_images."""
    missing_value: Severity = "error"
    """A null or blank in a column that a reward reads."""
    long_prompt: Refusal = "error"
    """A prompt that does not fit the model's context together with the chat template and a completion of full length.
    With RoPE of type dynamic or longrope, the context ends where its frequencies would change."""
    duplicate_prompt: Severity = "warn"
    """A prompt that occurs earlier in the same data, also in another of `sources`; `drop` keeps the first."""
    overlap: Severity = "error"
    """A training prompt that is also in data.eval: `drop` removes it from the training data. A prompt of
    `evaluation.sets` that is trained on: `drop` removes it from the set."""
    near_overlap: Severity = "error"
    """As overlap, but ignoring case and white space."""
    encoding: Severity = "warn"
    """Text that was decoded wrongly: replacement characters, control characters, UTF-8 read as Latin-1."""
    own_schema: Severity = "error"
    """A row that breaks a rule of data.schema."""


class CurriculumConfig(Section):
    kind: Literal["none", "easy_to_hard", "band", "variance"] = "none"
    """Which prompts an epoch takes, by their pass rates p. `none`: each once, in random order. `easy_to_hard`: each
    once, those with the highest rate first. `band`: only those within `band`, which also take the places of the others.
    `variance`: each in proportion to p(1 − p). An epoch always has as many prompts as the data set, and each of several
    sources keeps its share of them."""
    band: Bounds | None = None
    """Lowest and highest pass rate of the prompts that a `band` takes, such as [0.1, 0.9]."""
    probe: int = Field(0, ge=0, le=10_000)
    """Completions of each training prompt that are sampled from the base model before the training, for first pass
    rates. 0: none; pass rates then come from the training itself, from its second epoch on."""

    @property
    def begins_with_probe(self) -> bool:
        """True if a training begins with the probe's pass rates; kind 'none' uses no rates."""
        return self.probe > 0 and self.kind != "none"

    @model_validator(mode="after")
    def _band_is_for_a_band(self) -> CurriculumConfig:
        if self.kind == "band" and self.band is None:
            raise ValueError("kind='band' needs to know which pass rates; set band = [0.1, 0.9], or others")
        if self.kind != "band" and self.band is not None:
            raise ValueError(
                f"band={list(self.band)} is for kind='band', not for {self.kind!r}; set it, or remove band"
            )
        if self.band and not 0 <= self.band[0] < self.band[1] <= 1:
            raise ValueError(f"band={list(self.band)}: pass rates lie between 0 and 1, the lower one first")
        return self


warnings.filterwarnings("ignore", 'Field name "schema" in "DataConfig" shadows', UserWarning)


class PromptSource(Section):
    """Training and held-out prompts of one origin, and how to prepare them."""

    train: str
    """Training prompts: a .parquet, .jsonl, .json or .csv file, a dataset saved to disk, or a hub name."""
    eval: str
    """Held-out prompts, in any of the same forms; they must not be in `train`."""
    train_split: str = "train"
    """Split to take when `train` is a hub name or a saved DatasetDict."""
    eval_split: str = "test"
    """Split to take when `eval` is a hub name or a saved DatasetDict."""
    subset: str | None = None
    """Subset (configuration) of `train` and `eval`, such as "main" of openai/gsm8k; only for hub names."""
    revision: str | None = None
    """Hub revision (branch, tag or commit) of `train` and `eval`; only for hub names."""
    columns: dict[str, str] = Field(default_factory=dict)
    """Columns that the run needs, by what they are made of: a column of the data (`prompt = "question"`) or a field of
    one (`answer = "reward_model.ground_truth"`), a template (`prompt = "Question: {question}"`), or `module:function`,
    which is given each row as a dictionary. In `train`, `eval` and `evaluation.sets` alike. Default: the columns are
    called as the run needs them: `prompt`, those that the rewards read, and `answer`, the right answer if there is one,
    on which the rewards are tried before training."""
    system_prompt: str | None = None
    """System message before each prompt that has none; a prompt that is text becomes the user's message after it.
    Empty: no system message, but text becomes a message all the same. Default: prompts stay as they are."""

    @field_validator("columns")
    @classmethod
    def _can_be_made(cls, columns: dict[str, str]) -> dict[str, str]:
        for column, how in columns.items():
            try:
                empty = not how or (is_template(how) and not columns_read(how))
            except ValueError as error:
                raise ValueError(f"{column} = {how!r} is not a template: {error}") from None
            if empty:
                raise ValueError(
                    f"{column} = {how!r} names no column; give the name of one, a template with some in braces, or "
                    "module:function"
                )
        return columns


class DataSource(PromptSource):
    """One of several sources of prompts, such as one task of many."""

    name: str = Field(pattern=r"^[a-z0-9][a-z0-9_-]*$", max_length=100)
    """Name of the source in metrics, reports and guards, and in the column `source` of the validated data."""
    weight: float | None = Field(None, ge=1e-6, le=1e6)
    """Share of this source in the training, relative to the other sources' weights. An epoch is then one pass over the
    source that is used up first. Give all sources a weight, or none."""
    epochs: float | None = Field(None, gt=0, le=1)
    """Passes over this source per epoch of the run, at most 1: with 0.5, an epoch has half of its prompts, the next
    epoch the other half. Default: 1, unless there are weights."""
    rewards: list[str] | None = Field(None, min_length=1)
    """Names of the rewards that score this source; the others give None for its completions. Default: all."""
    environment: str | None = None
    """Name in `environment.environment_factory` of the class that its prompts are for. Default: given by the column
    `environment`."""
    max_completion_length: int | None = Field(None, ge=1)
    """Tokens after which a completion of this source is cut off, in training and evaluations; no more than elsewhere.
    Default: as elsewhere."""
    teacher: str | None = None
    """Model folder or hub name of the teacher of this source's completions, in the place of `teacher.model`. "": no
    teacher teaches them. Default: `teacher.model`."""


class DataConfig(PromptSource):
    train: str = ""
    """Training prompts: a .parquet, .jsonl, .json or .csv file, a dataset saved to disk, or a hub name. Required
    without `sources`."""
    eval: str = ""
    """Held-out prompts, in any of the same forms; they must not be in `train`. Required without `sources`."""
    sources: list[DataSource] = Field(default_factory=list)
    """Several sources of prompts, instead of `train` and `eval`."""
    chat_template_kwargs: dict[str, Any] = Field(default_factory=dict)
    """Variables of the model's chat template, such as `{ enable_thinking = false }`; the same in training and
    evaluation."""
    schema: str | None = None  # type: ignore[assignment]  # pydantic's own method of this name is deprecated
    """`module:Model`, a pandera DataFrameModel: your own rules about the columns of the data sets, besides those of
    `checks`. `checks.own_schema` says what to do with a row that breaks one."""
    max_images: int = Field(8, ge=1)
    """Images that a prompt may have, in the columns `image` or `images` or in its messages' parts."""
    max_image_pixels: int = Field(2**24, ge=1, le=MOST_PIXELS)
    """Pixels, height times width, that an image may have. One with more is not decoded."""
    checks: DataChecks = DataChecks()
    curriculum: CurriculumConfig = CurriculumConfig()

    @field_validator("schema")
    @classmethod
    def _is_module_and_model(cls, name: str | None) -> str | None:
        if name is not None and not is_function(name):
            raise ValueError(f"{name!r} is not of the form module:Model")
        return name

    @field_validator("chat_template_kwargs")
    @classmethod
    def _are_variables(cls, given: dict[str, Any]) -> dict[str, Any]:
        if taken := sorted(given.keys() & NO_VARIABLES):
            raise ValueError(f"{taken[0]!r} is not a variable of a chat template but set by this project; leave it out")
        return given

    @property
    def origins(self) -> dict[str, PromptSource]:
        """Sources of prompts by configuration key: `data` itself, or each of its sources."""
        return {f"data.sources.{place}": source for place, source in enumerate(self.sources)} or {"data": self}

    @model_validator(mode="after")
    def _has_prompts(self) -> DataConfig:
        if not self.sources:
            for key in ("train", "eval"):
                if key not in self.model_fields_set:
                    raise ValueError(f"{key} is missing; name prompts in train and eval, or several [[data.sources]]")
            return self
        for key in PromptSource.model_fields:
            if getattr(self, key) != DataConfig.model_fields[key].get_default(call_default_factory=True):
                raise ValueError(f"{key} beside data.sources: each source has its own; move it to [[data.sources]]")
        names = [source.name for source in self.sources]
        if len(set(names)) < len(names):
            raise ValueError(f"sources {names} share a name; give each its own")
        for place, source in enumerate(self.sources):
            if source.weight is not None and source.epochs is not None:
                raise ValueError(
                    f"sources.{place}: weight={source.weight:g} and epochs={source.epochs:g} both say how much of "
                    f"{source.name!r} an epoch has; remove one"
                )
        unweighted = [source.name for source in self.sources if source.weight is None]
        if unweighted and len(unweighted) < len(names):
            raise ValueError(
                f"sources: {unweighted[0]!r} has no weight, and others have: weights are shares of the whole; give all "
                "sources one, or none"
            )
        return self


class RewardConfig(Section):
    function: str
    """A built-in reward's name, or `package.module:function`: a function with TRL's signature, in an installed module,
    or in a file in the working folder or beside the configuration. `verl:module:function` is a function of verl,
    `swift:module:Class` a reward of ms-swift."""
    name: str = Field(
        default_factory=lambda given: given["function"].rsplit(":", 1)[-1],
        pattern=r"^[.-]*\w[\w.-]*$",
        max_length=100,  # with the longest name of a set, MLflow takes its metrics
        validate_default=True,
    )
    """Name in metrics, records and gates; default: the function's own. A function listed twice needs two names."""
    weight: float = 1.0
    """Factor of this reward in the sum."""
    clip: Bounds | None = None
    """Lowest and highest value that count; a value outside counts as the nearer of the two. Default: every value
    counts."""
    normalize: bool = False
    """Scale the values so that the bounds of `clip` count as 0 and 1."""
    gate: str | None = None
    """Name of another reward: where that reward gives less than `gate_threshold`, or None, this one counts as 0.
    Default: no gate."""
    gate_threshold: float = 1.0
    """Lowest value of the reward named in `gate` at which this reward counts."""
    args: dict[str, Any] = Field(default_factory=dict)
    """Keyword arguments passed to the function in each call."""
    timeout: float = Field(300.0, gt=0, le=LONGEST_SECONDS)
    """Seconds after which a call of the function counts as hung; the training then stops."""
    range: Bounds | None = None
    """Lowest and highest value that the function may give; any other value stops the run. Default: any; for a built-in
    reward, the range it documents."""
    isolated: bool = False
    """Run the function in its own process, which it can end, block or fill up without harm to the training. Recommended
    for code that you did not write. The rewards are the same."""
    memory_gib: float = Field(8.0, gt=0, le=MOST_GIB)
    """Memory that an isolated reward's process may take, in GiB; shared memory does not count."""

    @field_validator("function")
    @classmethod
    def _is_no_path(cls, function: str) -> str:
        framework = f"{framework_of(function)}:" if framework_of(function) else ""
        module, _, name = own_name(function).partition(":")
        if "/" in module or module.endswith(".py"):
            path = PurePath(module).with_suffix("")
            raise ValueError(
                f"{function!r} names a file; write '{framework}{path.name}:{name or 'FUNCTION'}', with {path.name}.py "
                "in the working folder or beside the configuration"
            )
        return function

    @model_validator(mode="after")
    def _args_can_be_written_as_toml(self) -> RewardConfig:
        missing = [key for key, value in self.args.items() if value is None]
        if missing:
            raise ValueError(f"args.{missing[0]} is null; leave it out to use the function's default")
        return self

    @model_validator(mode="after")
    def _args_are_keyword_arguments(self) -> RewardConfig:
        for key in self.args:
            if not key.isidentifier() or len(key) > LONGEST_ARGUMENT:
                raise ValueError(
                    f"args has the key {key!r}: an argument is a Python name of at most {LONGEST_ARGUMENT} characters"
                )
        return self

    @model_validator(mode="after")
    def _consistent(self) -> RewardConfig:
        for key, bounds in {"range": self.range, "clip": self.clip}.items():
            if bounds and bounds[0] >= bounds[1]:
                raise ValueError(f"{key}={list(bounds)} is empty; give the lowest value first")
        if self.range and not self.range[1] - self.range[0] <= WIDEST_RANGE:
            raise ValueError(
                f"range={list(self.range)} is wider than {WIDEST_RANGE:g}, which bounds nothing; give the lowest and "
                "highest value that the function really gives, or leave it out"
            )
        if self.normalize and not self.clip:
            raise ValueError("normalize=true needs to know which values become 0 and 1; set clip = [lowest, highest]")
        if self.gate == self.name:
            raise ValueError(f"gate={self.gate!r} is the reward itself; name another one, or clip its values")
        if self.gate is None and self.gate_threshold != 1:
            raise ValueError(f"gate_threshold={self.gate_threshold:g} without a gate; name the reward in gate")
        if not self.isolated and self.memory_gib != 8:
            raise ValueError(
                f"memory_gib={self.memory_gib:g} limits only the process of an isolated reward; set isolated = true"
            )
        return self


def quantisation_problem(values: Mapping[str, Any]) -> str:
    """Problem of a base whose saved weights are quantised, by the values of its config.json; "" if they are not.

    No training here dequantises any: weights without their scales, or kernels without a gradient, would train a model
    that no one has.
    """
    for part in (values, values.get("text_config") or {}):
        if found := part.get("quantization_config") or part.get("compression_config"):
            return (
                f"its weights are quantised (quant_method = {found.get('quant_method')!r}), and no training here is "
                "made for that; name the checkpoint that it was made from, or a dequantised copy (transformers loads "
                "fp8 and mxfp4 with `dequantize=True`, and save_pretrained writes it). model.load_in_4bit quantises a "
                "base itself"
            )
    return ""
