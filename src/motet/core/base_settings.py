"""The base of every group of settings: frozen, without unknown keys, without silent conversion of types.
Each package declares its settings next to the code that uses them; `train/job.py` joins them into a job."""

import ast
import inspect
import textwrap
from collections.abc import Collection, Iterator
from itertools import pairwise
from pathlib import Path
from typing import Annotated, cast

from pydantic import AfterValidator, BaseModel, ConfigDict, GetJsonSchemaHandler
from pydantic.json_schema import JsonSchemaValue
from pydantic_core import CoreSchema, PydanticCustomError


class FrozenSettings(BaseModel):
    """A frozen group of settings. A whole number may stand for a float; nothing else is converted."""

    # NaN and infinity are meaningless for every setting, and would pass most limits or fail them with odd messages.
    # A command makes few of the groups. Validators that wait until a group is made save a fifth of `motet plan`.
    model_config = ConfigDict(frozen=True, extra="forbid", strict=True, allow_inf_nan=False, defer_build=True)

    @classmethod
    def __get_pydantic_json_schema__(cls, core_schema: CoreSchema, handler: GetJsonSchemaHandler) -> JsonSchemaValue:
        """The schema, in which the strings below the fields describe them. They are read from the source only now,
        since it takes as long as all else that is done when a class of settings is made."""
        schema = handler(core_schema)
        properties = handler.resolve_ref_schema(schema).get("properties", {})
        for group in reversed(cls.__mro__):
            if issubclass(group, FrozenSettings):
                for name, text in _strings_below_fields(group, properties):
                    properties[name].pop("description", None)  # Of the field that this one replaces
                    properties[name] |= {"description": text} if text else {}
        return schema


def _strings_below_fields(group: type, fields: Collection[str]) -> Iterator[tuple[str, str]]:
    body = cast(ast.ClassDef, ast.parse(textwrap.dedent(inspect.getsource(group))).body[0]).body
    for field, below in pairwise([*body, ast.Pass()]):
        if isinstance(field, ast.AnnAssign) and isinstance(field.target, ast.Name) and field.target.id in fields:
            value = below.value if isinstance(below, ast.Expr) else None
            text = value.value if isinstance(value, ast.Constant) else None
            yield field.target.id, inspect.cleandoc(text) if isinstance(text, str) else ""


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
