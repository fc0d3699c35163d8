"""Pieces of messages: frozen models that refuse values of a wrong type."""

from typing import Annotated

from pydantic import BaseModel, ConfigDict, Field

UInt = Annotated[int, Field(ge=0, lt=2**63)]
Identifier = Annotated[str, Field(min_length=1, max_length=128)]


class WireModel(BaseModel):
    """A frozen piece of a message. A value of the wrong type is an error and is not converted."""

    model_config = ConfigDict(frozen=True, extra="ignore", strict=True, allow_inf_nan=False)
