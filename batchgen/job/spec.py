"""The job file as pydantic models: every field, its type, its default and its one-line meaning.

The JSON Schema in schemas/ is generated from these models. Reading a file into them, with line numbers and all mistakes
at once, is batchgen.job.load.
"""

from itertools import combinations
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import ConfigDict, Field, ValidationInfo, field_validator, model_validator

from batchgen.job.generate import Generate
from batchgen.job.places import Places, split_dotted
from batchgen.job.section import Section, Text, mistake
from batchgen.job.units import Duration, Share, Size, Tokens

PROMPT_KINDS = ("text", "user", "messages")


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
            raise mistake(kinds[1], f"{' and '.join(kinds)} exclude one another; keep one of text, user and messages")
        chat_only = [name for name in ("system", "tools", "chat_template") if getattr(self, name) is not None]
        if kinds == ["text"] and chat_only:
            raise mistake(chat_only[0], "belongs to a chat prompt; write `user: ...` instead of `text: ...`")
        if isinstance(self.messages, list) and self.system is not None:
            raise mistake("system", "messages are a list here; write the system message as its first entry")
        return self

    @property
    def kind(self) -> str | None:
        """Which of text, user and messages is given. None when the input brings its own messages."""
        return next((name for name in PROMPT_KINDS if getattr(self, name) is not None), None)


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
    stall: Duration | None = "30m"
    """End, resumable, when nothing moves for this long: no prompt, no step, no write. `null` for never."""
    template_seconds: Annotated[float, Field(gt=0)] = 2.0
    """Longest time to render one row's prompt."""
    template_chars: Annotated[int, Field(ge=1)] = 64 * 2**20
    """Longest text that a template may build."""


class Planning(Section):
    """In which order the rows run. It changes no answer in float32, and never the order of the output."""

    order: Literal["auto", "input"] = "auto"
    """`auto` runs prompts that begin alike together: what they share is computed once. `input` keeps the input's."""
    window: Literal["all"] | Annotated[int, Field(ge=1)] | Tokens = 100_000
    """Rows that are planned together, or tokens (`200M tokens`); no answer comes before the first window is read."""


class Output(Section):
    """Where the rows go."""

    path: Text
    """The output folder: local, s3:// or any fsspec URL."""
    columns: Literal["all"] | list[Text] = []
    """Input columns carried over; `all` for every one."""
    part_rows: Annotated[int, Field(ge=1)] = 10_000
    """Input rows per part file."""
    format: Literal["parquet", "jsonl", "openai"] = "parquet"
    """Parquet files, lines of JSON with the same columns, or the lines of an OpenAI batch output."""
    compression: Literal["zstd", "gzip", "snappy", "none"] | None = None
    """Compression of the parts; zstd for Parquet and none for text when not given."""

    @model_validator(mode="after")
    def _text_compression(self) -> "Output":
        if self.format != "parquet" and self.compression == "snappy":
            raise mistake("compression", "snappy is for Parquet; write zstd, gzip or none for lines of JSON")
        return self


class Checkpoint(Section):
    """How finished rows are kept until their part is whole."""

    every: Duration = "10s"
    """A finished row is safe after this long at most: what a kill costs."""


class Storage(Section):
    """How S3 is reached, for input, output and model alike. What is not given comes from the environment.

    Keys and tokens are no fields: they come from the environment, AWS configuration files or the machine's role.
    """

    endpoint: Text | None = None
    """URL of another S3 server than Amazon's, such as MinIO."""
    region: Text | None = None
    """Region of the buckets."""
    profile: Text | None = None
    """Profile of the AWS configuration files."""
    anonymous: bool = False
    """Send no credentials: for public buckets."""


class EngineOptions(Section):
    """How the engine runs. Defaults fit the model and the machine; in float32 none of these changes an answer, and in
    bfloat16 only its last bits."""

    device: Literal["auto", "cpu", "cuda"] = "auto"
    """`auto` takes the GPU when there is one."""
    dtype: Literal["auto", "bfloat16", "float32"] = "auto"
    """`auto` is bfloat16 where the hardware multiplies it fast, else float32."""
    max_length: Annotated[int, Field(ge=2)] | None = None
    """Longest prompt plus answer in tokens; the model's own limit when not given."""
    page_size: Annotated[int, Field(ge=1)] | None = None
    """Tokens per page of KV cache, shared without a copy; 64 on a GPU and 16 on a CPU when not given."""
    kv_memory: Size | None = None
    """Size of the KV cache (`4GiB`)."""
    max_batch_rows: Annotated[int, Field(ge=1)] | None = None
    """Most sequences that run at once."""
    max_batch_tokens: Annotated[int, Field(ge=1)] | None = None
    """Most tokens computed in one step."""
    prefix_caching: bool = True
    """Reuse the KV of prompts that begin alike."""
    batch_invariant: bool = False
    """On a GPU: an answer has the same bits whatever runs beside it, in bfloat16 too; a little slower."""
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
    plan: Planning = Planning()
    output: Output
    checkpoint: Checkpoint = Checkpoint()
    storage: Storage = Storage()
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
