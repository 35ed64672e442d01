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
from fnmatch import fnmatchcase
from importlib import resources
from itertools import pairwise
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal, TypeVar, cast, get_args, get_origin

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
        # An unknown key is often the wrong name of a missing one.
        details = sorted(error.errors(include_url=False), key=lambda each: each["type"] != "extra_forbidden")
        problems = (_describe_problem(kind, dict(detail)) for detail in details[:5])
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
    by_lower_case = {option.lower(): option for option in options}
    near = difflib.get_close_matches(word.lower(), by_lower_case, n=1, cutoff=cutoff)
    return f"did you mean {by_lower_case[near[0]]!r}?" if near else ""


def keys_named(root: type[BaseModel], word: str, prefix: str = "") -> list[str]:
    """Keys of the settings that have this name, here or in another program, such as `tensor_parallel_size`."""
    name, keys = word.rpartition(".")[2].strip("-").lower().replace("-", "_"), list[str]()
    for field, info in root.model_fields.items():
        patterns = [field, *getattr(root, "other_names", {}).get(field, "").split()]
        keys += [prefix + field] if any(fnmatchcase(name, pattern) for pattern in patterns) else []
        if get_origin(info.annotation) not in (tuple, dict):
            for group in _settings_classes_in(info.annotation):
                keys += keys_named(group, word, f"{prefix}{field}.")
    return list(dict.fromkeys(keys))


def _unknown_key(root: type[BaseModel], key: str, *, value: object, valid: list[str]) -> str:
    inner = f".{next(iter(value))}" if isinstance(value, dict) and len(value) == 1 else ""
    section, _, word = key.rpartition(".")
    keys = [name for name in keys_named(root, key + inner) if name != key + inner]
    keys = [name for name in keys if name.rpartition(".")[0] == section] or keys
    is_typo = not inner and bool(did_you_mean(word, valid, cutoff=0.85))  # A typo of a key of this section
    hint = f"did you mean {' or '.join(map(repr, keys[:3]))}?" if keys and not is_typo else did_you_mean(word, valid)
    return f"unknown key {key + inner * bool(keys)!r}; {hint or 'valid here: ' + ', '.join(valid)}"


def _describe_problem(root: type[BaseModel], detail: dict[str, Any]) -> str:
    keys, sibling_groups, inner_groups = _locate_problem(root, detail["loc"])
    key, ctx = ".".join(keys), detail.get("ctx", {})
    remedy = _remedy(keys[-1], detail, sibling_groups) if keys else ""
    discriminator = ctx.get("discriminator", "").strip("'")
    match detail["type"]:
        case "extra_forbidden":
            valid = sorted({name for group in sibling_groups for name in group.model_fields})
            return _unknown_key(root, key, value=detail["input"], valid=valid)
        case "missing" if keys[-1].isdigit():  # an entry of a list
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
            choices = ctx["expected"] + remedy if remedy else _choices(detail["input"], ctx["expected"])
            table = key.removesuffix(".[key]")  # pydantic's word for a key of a table
            name = f"{key} = {_shorten(detail['input'])}" if table == key else f"the key {table}"
            return f"{name} must be {choices}"
        case "model_type" | "model_attributes_type" if len(inner_groups) == 1:
            value = "..." if "=" in str(detail["input"]) else _shorten(detail["input"]).strip("'")
            example = f"{key}.{next(iter(inner_groups[0].model_fields))}={value}"
            return f"{key} = {_shorten(detail['input'])} must be a section with keys, such as {example}"
        case _:
            return f"{key} = {_shorten(detail['input'])} {describe_requirement(detail)}{remedy}"


def _remedy(name: str, detail: Mapping[str, Any], sibling_groups: "_Groups") -> str:
    """The end of a sentence about a wrong value: the text to write in its place."""
    value = str(detail["input"]).lower()
    remedies = {glob: text for group in sibling_groups for glob, text in getattr(group, "remedies", {}).items()}
    for pattern, text in remedies.items():
        if fnmatchcase(f"{name}={value}", pattern):
            return f"; {text}"
    if detail["type"] in ("tuple_type", "list_type"):
        return f"; write [{value}]" if "," in value else ""
    if not isinstance(detail["input"], str):
        return ""
    if re.search(r",\s*[a-z_.]+=", value):
        return "; separate settings by spaces"
    if value in ("auto", "none", "null", "default"):
        return "; leave it out for the default"
    number = re.fullmatch(r"([0-9]+\.?[0-9]*)\s*([kmb])", value)
    return f"; write its digits, such as {float(number[1]) * _UNITS[number[2]]:.0f}" if number else ""


_UNITS = {"k": 1e3, "m": 1e6, "b": 1e9}


def describe_requirement(detail: Mapping[str, Any]) -> str:
    """The requirement that a value misses, by the details of an error of pydantic."""
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
    "unexpected_keyword_argument": "is not a known field there",
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
        elif len(inner_groups) > 1:  # for one of several groups pydantic also names the tag, which is not a key
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
    # Names that users of other programs type: field -> patterns of its other names, pattern of
    # `field=value` -> remedy. They are hints of messages, and never accepted.
    other_names: ClassVar[Mapping[str, str]] = {}
    remedies: ClassVar[Mapping[str, str]] = {}

    @classmethod
    def __get_pydantic_json_schema__(cls, core_schema: CoreSchema, handler: GetJsonSchemaHandler) -> JsonSchemaValue:
        """The schema, in which the strings below the fields describe them. They are read from the source only now,
        since that takes as long as all other work to make a class of settings."""
        schema = handler(core_schema)
        properties = handler.resolve_ref_schema(schema).get("properties", {})
        for group in reversed(cls.__mro__):
            if issubclass(group, FrozenSettings):
                for name, text in _strings_below_fields(group, properties):
                    properties[name].pop("description", None)  # It describes the field that this one replaces
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
