"""Settings from a TOML file or a built-in name, checked, with a sentence for every mistake.

The base of every group of settings: frozen, without unknown keys, without silent conversion of types.
Each package declares its settings next to the code that uses them; `train/job.py` joins them into a job.
"""

import ast
import difflib
import inspect
import json
import re
import textwrap
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from importlib import resources
from itertools import pairwise
from pathlib import Path
from typing import Annotated, Any, Literal, TypeVar, cast, get_args, get_origin

from pydantic import AfterValidator, BaseModel, ConfigDict, GetJsonSchemaHandler, ValidationError
from pydantic.json_schema import JsonSchemaValue
from pydantic_core import CoreSchema, PydanticCustomError

from motet.core.errors import InputError
from motet.core.text_files import MAX_WHOLE_NUMBER, check_nesting, parse_toml

MAX_SHOWN = 300  # Characters of a value in a message

SettingsT = TypeVar("SettingsT", bound=BaseModel)


def builtin_texts(package: str, folder: str) -> dict[str, str]:
    """Name -> TOML text of the files in a folder of motet."""
    files = (resources.files(package) / folder).iterdir()
    return dict(sorted((f.name.removesuffix(".toml"), f.read_text()) for f in files if f.name.endswith(".toml")))


def read_toml(kind: str, source: str, builtin: Mapping[str, str], hint: str = "") -> dict[str, Any]:
    """The values of a file or of a built-in name. Errors mention `kind`, and `hint` if the source is neither."""
    if source in builtin:
        return parse_toml(builtin[source])
    try:
        content = Path(source).read_bytes()
    except (FileNotFoundError, IsADirectoryError, NotADirectoryError, ValueError):
        hints = [hint or did_you_mean(source, builtin), f"it is neither a file nor one of {', '.join(builtin)}"]
        raise InputError(f"no {kind} {source!r}: {' '.join(filter(None, hints))}") from None
    except OSError as error:
        raise InputError(f"cannot read {kind} {source}: {error.strerror}; give another TOML file") from None
    try:
        return parse_toml(content.decode("utf-8-sig"))
    except UnicodeDecodeError as error:
        line = content.count(b"\n", 0, error.start) + 1
        byte = f"byte 0x{content[error.start]:02x} in line {line}"
        raise InputError(f"{kind} {source} is not UTF-8 text: {byte}; save it as UTF-8") from None
    except ValueError as error:
        raise InputError(f"{kind} {source} is not valid TOML: {error}; fix it there") from None


def parse_value(text: str) -> Any:
    """A TOML value, or else the text itself, so that no shell needs nested quotes."""
    try:
        return parse_toml(f"value = {text}")["value"]
    except ValueError:
        return text


def settings_from_dict(kind: type[SettingsT], values: Mapping[str, Any], source: str) -> SettingsT:
    """The settings of nested values as TOML gives them."""
    try:
        check_nesting(dict(values))
        encoded = json.dumps(values, default=str)
    except ValueError as error:  # a hexadecimal number may have more digits than Python prints
        raise InputError(f"{source}: {str(error).partition(';')[0]}; give another value") from None
    for key, number in _whole_numbers(values):
        if abs(number) > MAX_WHOLE_NUMBER:
            limit = f"at most {MAX_WHOLE_NUMBER}" if number > 0 else f"at least -{MAX_WHOLE_NUMBER}"
            raise InputError(f"{source}: {key} = {_shorten(number)} must be {limit}")
    try:
        # Strict validation accepts a list for a tuple only in JSON.
        return kind.model_validate_json(encoded)
    except ValidationError as error:
        problems = (_describe_problem(kind, dict(detail)) for detail in error.errors(include_url=False)[:5])
        raise InputError(f"{source}: {'; '.join(dict.fromkeys(problems))}") from None


def _whole_numbers(value: object, key: str = "") -> Iterator[tuple[str, int]]:
    """The whole numbers of nested values, each with its key as users write it."""
    if isinstance(value, int):
        yield key, value
    inner = value.items() if isinstance(value, Mapping) else enumerate(value) if isinstance(value, list | tuple) else ()
    for name, item in inner:
        yield from _whole_numbers(item, f"{key}.{name}" if key else str(name))


def did_you_mean(word: str, options: Iterable[str], cutoff: float = 0.6) -> str:
    """A question if one of the options is similar, else an empty text."""
    near = difflib.get_close_matches(word, list(options), n=1, cutoff=cutoff)
    return f"did you mean {near[0]!r}?" if near else ""


def _describe_problem(root: type[BaseModel], detail: dict[str, Any]) -> str:
    keys, sibling_groups, inner_groups = _locate_problem(root, detail["loc"])
    key, ctx = ".".join(keys), detail.get("ctx", {})
    discriminator = ctx.get("discriminator", "").strip("'")
    match detail["type"]:
        case "extra_forbidden":
            valid = sorted({name for group in sibling_groups for name in group.model_fields})
            return f"unknown key {key!r}; {did_you_mean(keys[-1], valid) or 'valid here: ' + ', '.join(valid)}"
        case "missing" if keys[-1].isdigit():  # of a list
            return f"{'.'.join(keys[:-1])} = {_shorten(detail['input'])} has too few values"
        case "missing":
            return f"{key} is missing; give it a value, e.g. {key}=..."
        case "value_error":
            return str(ctx["error"])
        case "json_invalid":
            return "a text in it is not Unicode; write it in UTF-8"
        case "union_tag_not_found":
            tags = ", ".join(tag for group in inner_groups for tag in _discriminator_values(group))
            return f"{key}.{discriminator} is missing; give one of {tags}"
        case "union_tag_invalid":
            return f"{key}.{discriminator} = {ctx['tag']!r} must be one of {_choices(ctx['tag'], ctx['expected_tags'])}"
        case "literal_error":
            return f"{key} = {_shorten(detail['input'])} must be {_choices(detail['input'], ctx['expected'])}"
        case _:
            return f"{key} = {_shorten(detail['input'])} {describe_requirement(detail)}"


def describe_requirement(detail: Mapping[str, Any]) -> str:
    """Say what a value must be, by the details of an error of pydantic."""
    known = _REQUIREMENT_TEXTS.get(detail["type"])
    return known.format(**detail.get("ctx", {})) if known else str(detail["msg"])


def _shorten(value: object) -> str:
    text = repr(value)
    return text if len(text) <= MAX_SHOWN else f"{text[:MAX_SHOWN]}..."


_REQUIREMENT_TEXTS = {
    "greater_than_equal": "must be at least {ge}",
    "greater_than": "must be more than {gt}",
    "less_than_equal": "must be at most {le}",
    "less_than": "must be less than {lt}",
    "finite_number": "must be a finite number",
    "int_type": "must be a whole number",
    "float_type": "must be a number",
    "bool_type": "must be true or false",
    "string_type": "must be a text",
    "string_pattern_mismatch": "must be of letters, digits, '.', '_' and '-', and begin with a letter or digit",
    "string_too_short": "must have at least {min_length} characters",
    "string_too_long": "must have at most {max_length} characters",
    "unexpected_keyword_argument": "is no field that is known there",
    **dict.fromkeys(("missing", "missing_argument"), "is missing"),
    **dict.fromkeys(("tuple_type", "list_type"), "must be a list, [...]"),
    "too_short": "must have at least {min_length} entries",
    "too_long": "must have at most {max_length} entries",
    **dict.fromkeys(("model_type", "model_attributes_type", "dict_type"), "must be a section with keys"),
}


def _choices(value: object, expected: str) -> str:
    near = did_you_mean(str(value), re.findall("'([^']*)'", expected), cutoff=0.8)
    return f"{expected}; {near}" if near else expected


_Groups = Sequence[type[BaseModel]]


def _locate_problem(root: type[BaseModel], loc: Sequence[int | str]) -> tuple[list[str], _Groups, _Groups]:
    """The keys of a location as users write them, the groups of settings with its last key, and the groups in it."""
    keys, sibling_groups, inner_groups = list[str](), list[type[BaseModel]](), [root]
    for part in loc:
        if isinstance(part, int):  # all entries of a list have the same groups
            keys.append(str(part))
        elif len(inner_groups) > 1:  # for one of several groups pydantic also names the tag, which is no key
            inner_groups = [group for group in inner_groups if part in _discriminator_values(group)]
        else:
            keys.append(part)
            sibling_groups = inner_groups
            fields = [group.model_fields[part] for group in inner_groups if part in group.model_fields]
            inner_groups = [group for field in fields for group in _settings_classes_in(field.annotation)]
    return keys, sibling_groups, inner_groups


def _settings_classes_in(annotation: Any) -> list[type[BaseModel]]:
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return [annotation]
    return [group for part in get_args(annotation) for group in _settings_classes_in(part)]


def _discriminator_values(group: type[BaseModel]) -> list[str]:
    kinds = [field.annotation for field in group.model_fields.values()]
    return [str(get_args(kind)[0]) for kind in kinds if get_origin(kind) is Literal and len(get_args(kind)) == 1]


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
