"""What the sections of a job file have in common."""

from typing import Annotated

from pydantic import BaseModel, ConfigDict, Field
from pydantic_core import PydanticCustomError

Text = Annotated[str, Field(min_length=1)]


class Section(BaseModel):
    """A part of the job file. Unknown fields are mistakes, and a text is never taken for a number."""

    model_config = ConfigDict(
        extra="forbid", frozen=True, strict=True, allow_inf_nan=False, use_attribute_docstrings=True
    )


def mistake(field: str, message: str) -> PydanticCustomError:
    """A mistake between several fields of a section, shown at the line of one of them."""
    return PydanticCustomError("mistake", "{message}", {"field": field, "message": message})
