"""All that a job reads, opened and checked before its model loads: rows, tokenizer, templates, the model's config."""

import logging
import os
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from datetime import datetime
from functools import cached_property
from importlib.metadata import version
from pathlib import Path

import xxhash

from batchgen import openai_params
from batchgen.constraints import Constraints
from batchgen.data.columns import Asked
from batchgen.data.manifest import InputRecord, Manifest, PartFormat, SourceRecord, TemplateRecord
from batchgen.data.openai_lines import CUSTOM_ID
from batchgen.data.output import OutputFolder
from batchgen.data.resume import Resume
from batchgen.data.rows import Row
from batchgen.data.source import Source, open_source
from batchgen.data.storage import configure
from batchgen.errors import JobFileError
from batchgen.job.fingerprint import fingerprint, sources_of_values
from batchgen.job.spec import Job, Output
from batchgen.job.units import parse_duration
from batchgen.models.config import ModelConfig
from batchgen.models.gguf import content_fingerprint
from batchgen.models.resolve import resolve_model
from batchgen.prompts.builder import PromptBuilder, PromptRecipe
from batchgen.prompts.chat_source import ChatSource
from batchgen.prompts.reasoning import Thinking, find_markers
from batchgen.prompts.template import unknown_column
from batchgen.prompts.templates import PromptTemplates
from batchgen.prompts.tokenizer import Tokenizer
from batchgen.votes import check_vote

log = logging.getLogger(__name__)

_SHORT_GAP = 20_000  # rows
_ROWS_IN_PLACE = 2000  # fewer are tokenized here: worker processes take a second to start


@dataclass(frozen=True)
class Inputs:
    """A job's inputs."""

    job: Job
    source: Source
    model_path: Path
    config: ModelConfig
    tokenizer_path: Path
    tokenizer: Tokenizer
    chat_source: ChatSource | None
    constraints: Constraints
    thinking: Thinking | None

    @property
    def max_length(self) -> int:
        """Longest prompt plus answer, in tokens."""
        return self.job.engine.max_length or self.config.max_positions

    def num_workers(self, rows: int) -> int:
        """Processes that build so many prompts: as the job says, none for a few rows, else a quarter of the cores."""
        wanted = self.job.engine.prompt_workers
        if wanted is not None:
            return wanted
        return 0 if rows < _ROWS_IN_PLACE else min(8, max(1, (os.cpu_count() or 1) // 4))

    def builder(self, now: datetime) -> PromptBuilder:
        """Builds the job's prompts; `now` is what chat templates take for the present."""
        return PromptBuilder(_recipe(self.job, self.model_path, self.tokenizer_path, self.config, now), self.tokenizer)

    def rows(self, ranges: Iterable[range]) -> Iterator[Row]:
        """The rows with these indices, given as ranges in order. Short gaps are read over: opening files is slow."""
        for near in _neighbours(ranges):
            wanted = iter(near)
            now = next(wanted)
            for row in self.source.rows(near[0].start, near[-1].stop):
                if row.index >= now.stop:
                    now = next(wanted)
                if row.index >= now.start:
                    yield row

    def open_output(self, resume: Resume) -> OutputFolder:
        """Open the output folder, new or where an earlier run left it."""
        job = self.job
        return OutputFolder.open(
            job.output.path,
            manifest=self._manifest,
            carried=self.source.schema,
            asked=_asked_columns(job, self.constraints),
            compression=_compression(job.output),
            checkpoint_s=parse_duration(job.checkpoint.every),
            resume=resume,
        )

    def log_warnings(self) -> None:
        """Say once what the user should know, though the job can run."""
        for warning in self.source.warnings:
            log.warning(warning)  # its own format: messages of one format are shown once
        if self.tokenizer.vocab_size > self.config.vocab_size:
            log.warning(
                "the tokenizer has %d tokens, but the model's embedding %d rows: prompts with the tokens beyond fail",
                self.tokenizer.vocab_size,
                self.config.vocab_size,
            )

    @cached_property
    def _manifest(self) -> Manifest:
        job, files = self.job, self.source.files
        template = self.chat_source
        return Manifest(
            batchgen_version=version("batchgen"),
            spec=job.model_dump(mode="json"),
            fingerprint=fingerprint(job),
            inputs=tuple(
                InputRecord(path=f.path, num_rows=f.num_rows, bytes=f.bytes, fingerprint=f.fingerprint) for f in files
            ),
            model=SourceRecord(name=job.model, fingerprint=_content(self.model_path)),
            tokenizer=SourceRecord(name=job.tokenizer or job.model, fingerprint=_tokenizer_content(self.tokenizer)),
            chat_template=template
            and TemplateRecord(text=template.text, fingerprint=xxhash.xxh3_128_hexdigest(template.text.encode())),
            sources_of_values={name: str(origin) for name, origin in sources_of_values(job).items()},
            num_rows=self.source.num_rows,
            n=job.generate.n,
            part_rows=job.output.part_rows,
            part_format=self._part_format,
            part_compression=_compression(job.output),
        )

    @property
    def _part_format(self) -> PartFormat:
        """An OpenAI batch has requests of one kind: chats, or texts to complete."""
        if self.job.output.format != "openai":
            return self.job.output.format
        kind = self.job.prompt.kind
        is_chat = kind != "text" if kind is not None else self.source.has_column("messages")
        return "openai_chat" if is_chat else "openai_text"


def _compression(output: Output) -> str:
    return output.compression or ("zstd" if output.format == "parquet" else "none")


def _asked_columns(job: Job, constraints: Constraints) -> Asked:
    generate = job.generate
    return Asked(
        attempts=generate.retry is not None,
        reasoning=generate.thinking is not None,
        logprobs=generate.logprobs is not None,
        parsed=constraints.parsed_type,
        labels=() if isinstance(generate.choices, str) else generate.choices,
        label_logprobs=generate.choice_logprobs,
        score=generate.score is not None,
        vote=generate.vote is not None,
        as_json=job.output.format != "parquet",
    )


def _neighbours(ranges: Iterable[range]) -> Iterator[list[range]]:
    """The ranges in groups, within which the gaps are short."""
    near: list[range] = []
    for rows in ranges:
        if near and rows.start - near[-1].stop > _SHORT_GAP:
            yield near
            near = []
        near.append(rows)
    if near:
        yield near


def open_inputs(job: Job) -> Inputs:
    """Open and check everything that the job reads but the weights. Raises JobFileError or InputError."""
    configure(**job.storage.model_dump())
    templates = PromptTemplates(job.prompt, job.limits, job.generate)
    wanted = set(templates.columns)
    if job.input.format == "openai":
        wanted |= openai_params.COLUMNS
    carried = None if job.output.columns == "all" else list(job.output.columns)
    if carried is not None and job.output.format == job.input.format == "openai":
        carried = list(dict.fromkeys([*carried, CUSTOM_ID]))
    source = open_source(job.input, base=job.folder, columns=None if carried is None else wanted, carried=carried)
    _check_columns(job, source, templates)
    model_path = resolve_model(job.model, job.folder)
    config = ModelConfig.from_gguf(model_path) if model_path.is_file() else ModelConfig.from_folder(model_path)
    if job.engine.max_length is not None and job.engine.max_length > config.max_positions:
        raise JobFileError(
            f"{job.where('engine.max_length')}: {job.engine.max_length} tokens are more than the model's "
            f"{config.max_positions}; write a smaller number or leave the field out"
        )
    tokenizer_path = model_path if job.tokenizer is None else _tokenizer_path(job.tokenizer, job.folder)
    tokenizer = Tokenizer.load(tokenizer_path)
    recipe = _recipe(job, model_path, tokenizer_path, config, datetime.now().astimezone())
    builder = PromptBuilder(recipe, tokenizer)  # finds what is wrong with every row
    thinking = _thinking(job, tokenizer, builder.chat_source)
    constraints = Constraints(job, tokenizer, config)
    check_vote(job, constraints.parsed_type)
    chat_source = builder.chat_source
    return Inputs(job, source, model_path, config, tokenizer_path, tokenizer, chat_source, constraints, thinking)


def _thinking(job: Job, tokenizer: Tokenizer, chat: ChatSource | None) -> Thinking | None:
    reasoning = job.generate.thinking
    if reasoning is None:
        return None
    where = job.where("generate.reasoning")
    markers = find_markers(reasoning, tokenizer, None if chat is None else chat.text, where)
    return Thinking(markers, tokenizer, reasoning.max_tokens)


def _recipe(job: Job, model_path: Path, tokenizer_path: Path, config: ModelConfig, now: datetime) -> PromptRecipe:
    return PromptRecipe(
        prompt=job.prompt,
        generate=job.generate,
        limits=job.limits,
        model_path=str(model_path),
        tokenizer_path=str(tokenizer_path),
        max_length=job.engine.max_length or config.max_positions,
        folder=job.folder,
        now=now,
    )


def _check_columns(job: Job, source: Source, templates: PromptTemplates) -> None:
    """Columns that the job names are in the input: those of prompts in every file, those carried over in some."""
    templates.check_columns(source.columns, source.has_column, job.where)
    source.require(sorted(templates.required_columns))
    if job.output.columns == "all":
        return
    missing = [
        f"{job.where(f'output.columns.{place}')}: {unknown_column(name, sorted(source.columns))}"
        for place, name in enumerate(job.output.columns)
        if not source.has_column(name)
    ]
    if missing:
        raise JobFileError("\n".join(missing))


def _tokenizer_path(name: str, folder: Path) -> Path:
    path = folder / name
    return path if path.is_dir() else resolve_model(name, folder)


def _content(path: Path) -> str:
    """A fingerprint of a model by its content: weights, config and what comes with them."""
    if path.is_file():
        return content_fingerprint(path)
    digest = xxhash.xxh3_128()
    for file in _model_files(path):
        digest.update(f"{file.name}:{content_fingerprint(file)}\n".encode())
    return digest.hexdigest()


def _model_files(folder: Path) -> Iterator[Path]:
    yield from sorted(
        p for p in folder.iterdir() if p.suffix == ".safetensors" or p.name in ("config.json", "generation_config.json")
    )


def _tokenizer_content(tokenizer: Tokenizer) -> str:
    return xxhash.xxh3_128_hexdigest(f"{tokenizer.backend.to_str()}{tokenizer.prefix}".encode())
