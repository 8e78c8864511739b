"""The JSON Schema of the job file, for editors: made from the models, installed as batchgen.schemas."""

import json
from importlib.resources import files
from typing import Any

from pydantic.json_schema import GenerateJsonSchema, JsonSchemaValue

from batchgen.errors import JobFileError
from batchgen.job.generate import FIXED
from batchgen.job.spec import PROMPT_KINDS, Job

# The models say this in code: there is a prompt unless the input brings its own messages.
_PROMPT_IS_GIVEN = {
    "if": {"properties": {"input": {"properties": {"format": {"const": "openai"}}, "required": ["format"]}}},
    "else": {
        "properties": {"prompt": {"anyOf": [{"required": [kind]} for kind in PROMPT_KINDS]}},
        "required": ["prompt"],
    },
}


class _WithoutTitles(GenerateJsonSchema):
    """pydantic's schema without a title for every field."""

    def field_title_should_be_set(self, schema: Any) -> bool:
        return False

    def model_schema(self, schema: Any) -> JsonSchemaValue:
        made = super().model_schema(schema)
        made.pop("title", None)
        return made


def job_schema() -> str:
    """The text of schemas/job.schema.json."""
    heading = {"$schema": GenerateJsonSchema.schema_dialect, "title": "batchgen job file"}
    schema = Job.model_json_schema(schema_generator=_WithoutTitles)
    fields = schema["$defs"]["Generate"]["properties"]
    fields |= {name: _or_template(field) for name, field in fields.items() if name not in FIXED}
    return json.dumps(heading | schema | _PROMPT_IS_GIVEN, indent=2) + "\n"


def _or_template(field: dict[str, Any]) -> dict[str, Any]:
    about = {key: field[key] for key in ("default", "description") if key in field}
    plain = {key: value for key, value in field.items() if key not in about}
    kinds = plain.get("anyOf", [plain])
    return about | {"anyOf": [*kinds, {"type": "string", "pattern": "[{][{%]"}]}


def schema_names() -> list[str]:
    """The schemas that come with batchgen: "job" and its siblings."""
    names = (file.name for file in files("batchgen.schemas").iterdir())
    return sorted(name.removesuffix(".schema.json") for name in names if name.endswith(".schema.json"))


def read_schema(name: str) -> str:
    """The text of one schema. Raises JobFileError when there is no such schema."""
    if name not in schema_names():
        raise JobFileError(f"there is no schema {name!r}; the schemas are {', '.join(schema_names())}")
    return files("batchgen.schemas").joinpath(f"{name}.schema.json").read_text(encoding="utf-8")
