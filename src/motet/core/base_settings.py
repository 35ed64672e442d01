"""The base of every group of settings: frozen, without unknown keys, without silent conversion of types.

Each room declares its settings beside what they set up; `train/job.py` joins them into a job.
"""

from typing import Annotated

from pydantic import AfterValidator, BaseModel, ConfigDict
from pydantic_core import PydanticCustomError


class FrozenSettings(BaseModel):
    """A frozen group of settings. A whole number is taken where a float is meant; nothing else is converted."""

    # No setting means anything as NaN or infinity, and both would pass most limits or fail them with odd words.
    model_config = ConfigDict(
        frozen=True, extra="forbid", strict=True, use_attribute_docstrings=True, allow_inf_nan=False
    )


def _check_file_name(text: str) -> str:
    """Refuse at once what no file can be called, so that nobody need expect it later."""
    if not text or "\0" in text or any(len(part.encode()) > _MAX_NAME_BYTES for part in text.split("/")):
        raise PydanticCustomError(
            "place", "cannot be the name of a file or folder, which has 1 to 255 bytes between two `/`"
        )
    return text


_MAX_NAME_BYTES = 255

# The name of something on disk, or of what may be there.
FilePathText = Annotated[str, AfterValidator(_check_file_name)]
