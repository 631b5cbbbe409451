"""Configuration sections: frozen, checked, and refusing what they do not know with the nearest name."""

from pydantic import BaseModel, ConfigDict


class Section(BaseModel):
    """A part of a configuration. Frozen and hashable; unknown keys and wrong types are refused."""

    model_config = ConfigDict(frozen=True, extra="forbid", use_attribute_docstrings=True, validate_default=True)
