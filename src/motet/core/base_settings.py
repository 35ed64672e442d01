"""The base of every group of settings: frozen, without unknown keys, without silent conversion of types.
Each package declares its settings next to the code that uses them; `train/job.py` joins them into a job."""

from pathlib import Path
from typing import Annotated

from pydantic import AfterValidator, BaseModel, ConfigDict
from pydantic_core import PydanticCustomError


class FrozenSettings(BaseModel):
    """A frozen group of settings. A whole number may stand for a float; nothing else is converted."""

    # NaN and infinity are meaningless for every setting, and would pass most limits or fail them with odd messages.
    model_config = ConfigDict(
        frozen=True, extra="forbid", strict=True, use_attribute_docstrings=True, allow_inf_nan=False
    )


MAX_PATH_PARTS = 200  # Folders are made one by one
MAX_PATH_BYTES = 2000  # Linux takes 4095, and names of files follow


def _check_path(text: str) -> str:
    parts = [part.encode() for part in text.split("/")]
    if not text or "\0" in text or max(map(len, parts)) > 255:
        raise PydanticCustomError(
            "path", "cannot be the name of a file or folder, which has 1 to 255 bytes between two `/`"
        )
    if sum(map(len, parts)) + len(parts) > MAX_PATH_BYTES or len(parts) > MAX_PATH_PARTS:
        raise PydanticCustomError("path", "is too long for the name of a file or folder; give a shorter one")
    try:
        Path(text).expanduser()
    except RuntimeError:
        raise PydanticCustomError("path", "begins with the home folder of a user who is unknown here") from None
    return text


# The path of a file or folder, which need not exist.
FilePathText = Annotated[str, AfterValidator(_check_path)]
