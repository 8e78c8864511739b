"""The job file as pydantic models: every field, its type, its default and its one-line meaning.

The JSON Schema in schemas/ is generated from these models. Reading a file into them, with line numbers and all mistakes
at once, is batchgen.job.load.
"""

from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, field_validator, model_validator

Text = Annotated[str, Field(min_length=1)]
Probability = Annotated[float, Field(gt=0, le=1)]


class Section(BaseModel):
    """A part of the job file. Unknown fields are mistakes, and a text is never taken for a number."""

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True, allow_inf_nan=False, use_attribute_docstrings=True)


class Input(Section):
    """Where the rows come from."""

    path: Text | list[Text]
    """File, folder or pattern, or a list of them: local, s3:// or any fsspec URL. With `format: datasets`, a dataset."""
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
    """How a row becomes a prompt: `text` (raw), or `user`/`system` (chat), or `messages` (chat, from a column)."""

    text: Text | None = None
    """Jinja template over the row's columns, given to the model as raw text."""
    system: str | None = None
    """Jinja template of the system message."""
    user: Text | None = None
    """Jinja template of the user message."""
    messages: Text | list[dict[str, Any]] | None = None
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
        kinds = [name for name in ("text", "user", "messages") if getattr(self, name) is not None]
        if len(kinds) > 1:
            raise ValueError(f"give one of text, user and messages, not {' and '.join(kinds)}")
        if kinds == ["text"] and (self.system is not None or self.tools is not None):
            raise ValueError("system and tools belong to a chat prompt: write `user: ...` instead of `text: ...`")
        return self


class Generate(Section):
    """What the model is asked for."""

    choices: Annotated[list[str], Field(min_length=2)] | None = None
    """The answer is one of these texts: the likeliest one, with the probability of each."""
    max_tokens: Annotated[int, Field(ge=1)] = 256
    """Longest answer."""
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
    logit_bias: dict[int, float] = {}
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
    """Answers per row; each is one output row."""
    logprobs: Annotated[int, Field(ge=0, le=20)] | None = None
    """Log-probabilities of the answer's tokens, with this many alternatives each."""

    @field_validator("stop")
    @classmethod
    def _as_list(cls, value: str | list[str]) -> list[str]:
        return [value] if isinstance(value, str) else value

    @field_validator("choices")
    @classmethod
    def _distinct(cls, value: list[str] | None) -> list[str] | None:
        if value is None:
            return value
        if "" in value:
            raise ValueError("an empty text is no choice")
        if len(set(value)) != len(value):
            raise ValueError(f"the same choice twice: {next(c for c in value if value.count(c) > 1)!r}")
        return value

    @model_validator(mode="after")
    def _fits(self) -> "Generate":
        if self.min_tokens > self.max_tokens:
            raise ValueError(f"min_tokens ({self.min_tokens}) is larger than max_tokens ({self.max_tokens})")
        if self.choices is not None and self.n > 1:
            raise ValueError("n is for sampled answers; choices have one answer and its probabilities")
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
    failed_rows: str | Annotated[int, Field(ge=0)] = "0%"
    """More rows not ok than this (a count, or a share like `1%`) end the job as failed, exit code 10."""
    runtime: str | None = None
    """Stop cleanly after this long (`6h`, `90m`, `30s`); run again to resume."""
    template_seconds: Annotated[float, Field(gt=0)] = 2.0
    """Longest time to render one row's prompt."""
    template_chars: Annotated[int, Field(ge=1)] = 64 * 2**20
    """Longest text that a template may build."""

    @field_validator("failed_rows")
    @classmethod
    def _count_or_share(cls, value: str | int) -> str | int:
        if isinstance(value, str):
            parse_share(value)
        return value

    @field_validator("runtime")
    @classmethod
    def _duration(cls, value: str | None) -> str | None:
        if value is not None:
            parse_duration(value)
        return value


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


class EngineOptions(Section):
    """How the engine runs. Defaults are chosen from the model and the machine; none of these changes an answer in float32."""

    device: Literal["auto", "cpu", "cuda"] = "auto"
    """`auto` takes the GPU when there is one."""
    dtype: Literal["auto", "bfloat16", "float32"] = "auto"
    """`auto` is bfloat16 where the hardware multiplies it fast, else float32."""
    max_length: Annotated[int, Field(ge=2)] | None = None
    """Longest prompt plus answer in tokens; the model's own limit when not given."""
    page_size: Annotated[int, Field(ge=1)] = 64
    """Tokens per page of KV cache."""
    kv_memory: str | None = None
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

    @field_validator("kv_memory")
    @classmethod
    def _size(cls, value: str | None) -> str | None:
        if value is not None:
            parse_size(value)
        return value


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
    prompt: Prompt
    generate: Generate = Generate()
    limits: Limits = Limits()
    output: Output
    engine: EngineOptions = EngineOptions()

    _folder: Path = Path()

    @property
    def folder(self) -> Path:
        """Where the job file lies: relative paths in it start here."""
        return self._folder


_UNITS = {"s": 1, "m": 60, "h": 3600, "d": 86400}
_BYTES = {"KB": 10**3, "MB": 10**6, "GB": 10**9, "KiB": 2**10, "MiB": 2**20, "GiB": 2**30}


def parse_duration(text: str) -> float:
    """Seconds of `90`, `30s`, `90m`, `6h` or `2d`. Raises ValueError."""
    number, unit = (text[:-1], text[-1]) if text[-1:] in _UNITS else (text, "s")
    try:
        seconds = float(number) * _UNITS[unit]
    except ValueError:
        seconds = -1.0
    if not 0 < seconds < float("inf"):
        raise ValueError(f"{text!r} is no duration: write 30s, 90m, 6h or 2d")
    return seconds


def parse_size(text: str) -> int:
    """Bytes of `4GiB`, `500MB` and the like. Raises ValueError."""
    for unit, factor in _BYTES.items():
        if text.endswith(unit):
            try:
                size = int(float(text.removesuffix(unit)) * factor)
            except ValueError:
                break
            if size > 0:
                return size
    raise ValueError(f"{text!r} is no size: write 4GiB or 500MB")


def parse_share(text: str) -> float:
    """Share of `1%` as a number from 0 to 1. Raises ValueError."""
    try:
        share = float(text.removesuffix("%")) / 100
    except ValueError:
        share = -1.0
    if not text.endswith("%") or not 0 <= share <= 1:
        raise ValueError(f"{text!r} is no share: write 1% or a number of rows")
    return share
