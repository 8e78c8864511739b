"""The job file as pydantic models: every field, its type, its default and its one-line meaning.

The JSON Schema in schemas/ is generated from these models. Reading a file into them, with line numbers and all mistakes
at once, is batchgen.job.load.
"""

from itertools import combinations
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationInfo, field_validator, model_validator
from pydantic_core import PydanticCustomError

from batchgen.job.places import Places, split_dotted
from batchgen.job.units import Duration, Share, Size

Text = Annotated[str, Field(min_length=1)]
Probability = Annotated[float, Field(gt=0, le=1)]
GREEDY_BELOW = 1e-5
PROMPT_KINDS = ("text", "user", "messages")


def _mistake(field: str, message: str) -> PydanticCustomError:
    """A mistake between several fields of a section, shown at the line of one of them."""
    return PydanticCustomError("mistake", "{message}", {"field": field, "message": message})


class Section(BaseModel):
    """A part of the job file. Unknown fields are mistakes, and a text is never taken for a number."""

    model_config = ConfigDict(
        extra="forbid", frozen=True, strict=True, allow_inf_nan=False, use_attribute_docstrings=True
    )


class Input(Section):
    """Where the rows come from."""

    path: Text | Annotated[list[Text], Field(min_length=1)]
    """File, folder, pattern or a list of them: local, s3:// or any fsspec URL; a dataset with `format: datasets`."""
    format: Literal["auto", "parquet", "jsonl", "csv", "openai", "datasets"] = "auto"
    """`auto` goes by the file names."""
    limit: Annotated[int, Field(ge=1)] | None = None
    """Read the first rows only."""
    split: str = "train"
    """Which split of a `datasets` input."""
    decode_binary: bool = False
    """Read binary Parquet columns as UTF-8 text."""
    max_line_bytes: Annotated[int, Field(ge=1024)] = 128 * 2**20
    """A longer JSONL line is an error row, and is never held whole."""
    on_bad_row: Literal["error_row", "stop"] = "error_row"
    """Whether a row that can't be read becomes a row with an error or ends the job."""


class Prompt(Section):
    """How a row becomes a prompt: `text` (raw), or `user` and `system` (chat), or `messages` (chat).

    With `format: openai` the input brings its own messages.
    """

    model_config = ConfigDict(
        json_schema_extra={"not": {"anyOf": [{"required": list(pair)} for pair in combinations(PROMPT_KINDS, 2)]}}
    )

    text: Text | None = None
    """Jinja template over the row's columns, given to the model as raw text."""
    system: str | None = None
    """Jinja template of the system message."""
    user: Text | None = None
    """Jinja template of the user message."""
    messages: Text | Annotated[list[dict[str, Any]], Field(min_length=1)] | None = None
    """Name of a column that holds a list of chat messages, or a list of messages whose contents are templates."""
    tools: Text | list[dict[str, Any]] | None = None
    """Tool definitions for the chat template: a column's name or a list."""
    assistant: Text | None = None
    """Jinja template of the start of the answer; the model goes on from it."""
    chat_template: Text | None = None
    """A file that holds the chat template, instead of the model's own."""
    chat_template_args: dict[str, Any] = {}
    """More variables for the chat template, such as `enable_thinking: false`."""
    special_tokens: Literal["text", "parse"] = "text"
    """Whether special-token text in raw `text` prompts and in data is text or becomes control tokens."""

    @model_validator(mode="after")
    def _one_kind(self) -> "Prompt":
        kinds = [name for name in PROMPT_KINDS if getattr(self, name) is not None]
        if len(kinds) > 1:
            raise _mistake(kinds[1], f"{' and '.join(kinds)} exclude one another; keep one of text, user and messages")
        chat_only = [name for name in ("system", "tools", "chat_template") if getattr(self, name) is not None]
        if kinds == ["text"] and chat_only:
            raise _mistake(chat_only[0], "belongs to a chat prompt; write `user: ...` instead of `text: ...`")
        if isinstance(self.messages, list) and self.system is not None:
            raise _mistake("system", "messages are a list here; write the system message as its first entry")
        return self

    @property
    def kind(self) -> str | None:
        """Which of text, user and messages is given. None when the input brings its own messages."""
        return next((name for name in PROMPT_KINDS if getattr(self, name) is not None), None)


class Generate(Section):
    """What the model is asked for."""

    choices: Annotated[list[str], Field(min_length=2)] | None = None
    """The answer is one of these texts: the likeliest one, with the probability of each."""
    max_tokens: Annotated[int, Field(ge=1)] | None = 256
    """Longest answer; `null` for as much as fits."""
    min_tokens: Annotated[int, Field(ge=0)] = 0
    """No end of sequence and no stop before this many tokens."""
    temperature: Annotated[float, Field(ge=0)] = 0.0
    """0 takes the likeliest token; below 1e-5 counts as 0."""
    top_k: Annotated[int, Field(ge=-1)] = 0
    """Sample among this many likeliest tokens; 0 and -1 mean all."""
    top_p: Probability = 1.0
    """Sample among the likeliest tokens that together have this probability."""
    min_p: Annotated[float, Field(ge=0, le=1)] = 0.0
    """Sample among tokens at least this probable, relative to the likeliest."""
    repetition_penalty: Annotated[float, Field(gt=0)] = 1.0
    """Divides positive logits (multiplies negative ones) of tokens seen in prompt or output."""
    presence_penalty: Annotated[float, Field(ge=-2, le=2)] = 0.0
    """Subtracted from the logit of every token seen in the output."""
    frequency_penalty: Annotated[float, Field(ge=-2, le=2)] = 0.0
    """Subtracted for each time that a token was seen in the output."""
    logit_bias: Annotated[
        dict[Annotated[int, Field(ge=0)], float], Field(json_schema_extra={"propertyNames": {"pattern": "^[0-9]+$"}})
    ] = {}
    """Added to the logits of these token ids."""
    stop: Text | list[Text] = []
    """End the answer before the first of these texts."""
    stop_token_ids: list[Annotated[int, Field(ge=0)]] = []
    """End the answer at these tokens, besides the model's own ends of sequence."""
    include_stop: bool = False
    """Keep the stop text in the output."""
    ignore_eos: bool = False
    """Go on past the model's ends of sequence; only length and `stop` end an answer."""
    skip_special_tokens: bool = True
    """Leave special tokens out of the output text."""
    seed: Annotated[int, Field(ge=0, lt=2**63)] = 0
    """The job's seed: each row's noise comes from (seed, row, sample) alone."""
    n: Annotated[int, Field(ge=1)] = 1
    """Answers per row, each one output row; more than one needs a temperature."""
    logprobs: Annotated[int, Field(ge=0, le=20)] | None = None
    """Log-probabilities of the answer's tokens, with this many alternatives each."""

    @field_validator("stop")
    @classmethod
    def _as_list(cls, value: str | list[str]) -> list[str]:
        return [value] if isinstance(value, str) else value

    @field_validator("logit_bias", mode="before")
    @classmethod
    def _token_ids(cls, value: Any) -> Any:
        """Keys of a mapping in a file are text."""
        if not isinstance(value, dict):
            return value
        wrong = next((key for key in value if not str(key).isdecimal()), None)
        if wrong is not None:
            raise ValueError(f"{wrong!r} is no token id; write whole numbers, such as `{{50256: -100}}`")
        return {int(key): bias for key, bias in value.items()}

    @field_validator("choices")
    @classmethod
    def _distinct(cls, value: list[str] | None) -> list[str] | None:
        if value is None:
            return value
        if "" in value:
            raise ValueError("an empty text is no choice; write at least one character for each")
        if len(set(value)) != len(value):
            raise ValueError(f"has {next(c for c in value if value.count(c) > 1)!r} twice; keep each choice once")
        return value

    @model_validator(mode="after")
    def _fits(self) -> "Generate":
        if self.max_tokens is not None and self.min_tokens > self.max_tokens:
            raise _mistake("min_tokens", f"{self.min_tokens} is more than max_tokens ({self.max_tokens}); lower it")
        if self.choices is not None and self.n > 1:
            raise _mistake("n", "is for sampled answers, and choices have one answer each; leave it out")
        if self.n > 1 and self.temperature < GREEDY_BELOW:
            raise _mistake("n", f"{self.n} answers at temperature 0 are all the same; raise temperature or leave n out")
        return self


class Truncate(Section):
    """Cut one field of the row until the prompt fits, by exact tokens."""

    field: Text
    """The column whose text is cut."""
    keep: Literal["head", "tail"] = "head"
    """Which end of the text stays."""


class Truncation(Section):
    """The mapping under `limits.overlong`."""

    truncate: Truncate


class Limits(Section):
    """What the job puts up with."""

    overlong: Literal["error", "skip"] | Truncation = "error"
    """A prompt that leaves no room for an answer: an error row, a skipped row, or cut to fit."""
    failed_rows: Share | Annotated[int, Field(ge=0)] = "0%"
    """More rows not ok than this (a count, or a share like `1%`) end the job as failed, exit code 10."""
    runtime: Duration | None = None
    """Stop cleanly after this long (`6h`, `90m`, `30s`); run again to resume."""
    template_seconds: Annotated[float, Field(gt=0)] = 2.0
    """Longest time to render one row's prompt."""
    template_chars: Annotated[int, Field(ge=1)] = 64 * 2**20
    """Longest text that a template may build."""


class Output(Section):
    """Where the rows go."""

    path: Text
    """The output folder: local, s3:// or any fsspec URL."""
    columns: Literal["all"] | list[Text] = []
    """Input columns carried over; `all` for every one."""
    part_rows: Annotated[int, Field(ge=1)] = 10_000
    """Input rows per part file."""
    compression: Literal["zstd", "snappy", "none"] = "zstd"
    """Compression of the parts."""


class Checkpoint(Section):
    """How finished rows are kept until their part is whole."""

    every: Duration = "10s"
    """A finished row is safe after this long at most: what a kill costs."""


class EngineOptions(Section):
    """How the engine runs. Defaults fit the model and the machine; in float32 none of these changes an answer."""

    device: Literal["auto", "cpu", "cuda"] = "auto"
    """`auto` takes the GPU when there is one."""
    dtype: Literal["auto", "bfloat16", "float32"] = "auto"
    """`auto` is bfloat16 where the hardware multiplies it fast, else float32."""
    max_length: Annotated[int, Field(ge=2)] | None = None
    """Longest prompt plus answer in tokens; the model's own limit when not given."""
    page_size: Annotated[int, Field(ge=1)] | None = None
    """Tokens per page of KV cache, the grain of sharing; 64 on a GPU and 16 on a CPU when not given."""
    kv_memory: Size | None = None
    """Size of the KV cache (`4GiB`)."""
    max_batch_rows: Annotated[int, Field(ge=1)] | None = None
    """Most sequences that run at once."""
    max_batch_tokens: Annotated[int, Field(ge=1)] | None = None
    """Most tokens computed in one step."""
    prefix_caching: bool = True
    """Reuse the KV of prompts that begin alike."""
    threads: Annotated[int, Field(ge=1)] | None = None
    """CPU threads of the engine."""
    prompt_workers: Annotated[int, Field(ge=1)] | None = None
    """Processes that render and tokenize prompts."""


class Job(Section):
    """A whole job file."""

    version: Literal[1]
    """Version of the job file's format."""
    name: Text | None = None
    """A name for logs and the manifest."""
    model: Text
    """A hub id, a folder, a .gguf file, or an s3:// folder."""
    tokenizer: Text | None = None
    """Folder or hub id of the tokenizer, when it is not the model's own."""
    input: Input
    prompt: Annotated[Prompt, Field(validate_default=True)] = Prompt()
    generate: Generate = Generate()
    limits: Limits = Limits()
    output: Output
    checkpoint: Checkpoint = Checkpoint()
    engine: EngineOptions = EngineOptions()

    _places: Places = Places()

    @field_validator("prompt")
    @classmethod
    def _some_kind(cls, value: Prompt, info: ValidationInfo) -> Prompt:
        source = info.data.get("input")
        if source is not None and source.format != "openai" and value.kind is None:
            raise ValueError("says nothing to send; add one of `user: ...`, `text: ...` or `messages: ...` under it")
        return value

    @property
    def folder(self) -> Path:
        """Where the job file lies: relative paths in it start here."""
        return self._places.folder

    def is_override(self, field: str) -> bool:
        """Whether `--set` gave the value of a field, or a part of it."""
        return self._places.is_override(split_dotted(field))

    def where(self, field: str) -> str:
        """How a message names a field (`generate.seed`): "job.yaml:12: generate.seed"."""
        return self._places.where(split_dotted(field))
