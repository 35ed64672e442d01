"""The base of every group of settings: frozen, without unknown keys, without silent conversion of types.
Each package declares its settings next to the code that uses them; `train/job.py` joins them into a job."""

from typing import Annotated

from pydantic import AfterValidator, BaseModel, ConfigDict
from pydantic_core import PydanticCustomError


class FrozenSettings(BaseModel):
    """A frozen group of settings. A whole number may stand for a float; nothing else is converted."""

    # NaN and infinity are meaningless for every setting, and would pass most limits or fail them with odd messages.
    model_config = ConfigDict(
        frozen=True, extra="forbid", strict=True, use_attribute_docstrings=True, allow_inf_nan=False
    )


def _check_path(text: str) -> str:
    if not text or "\0" in text or any(len(part.encode()) > 255 for part in text.split("/")):
        raise PydanticCustomError(
            "path", "cannot be the name of a file or folder, which has 1 to 255 bytes between two `/`"
        )
    return text


# The path of a file or folder, which need not exist.
FilePathText = Annotated[str, AfterValidator(_check_path)]
