"""The page of all settings of a job with type, default and meaning, from the JSON schema."""

import json
from collections.abc import Iterator
from typing import Any

from motet.train.job import Job

INTRODUCTION = """# The settings of a job

A job is one TOML file. `motet train --schema` prints the same as a JSON schema, for editors. On the command line any
setting is replaced as `section.key=value`; [the guide](../guide/jobs.md) says how.

*Not given* is the default where a key may be left out and has no value then. TOML has no null: to go back to *not
given*, leave the key out.

`name`, at the top of the file and outside of any section, names the run folders: letters, digits, `.`, `_` and `-`.
Where it is not given it is the file's own name.
"""

FAMILIES = {"decoder": "DecoderSettings", "encoder": "EncoderSettings", "encoder-decoder": "EncoderDecoderSettings"}
OWN_MODELS = """`family` chooses one of three architectures, or [a custom module](#model-with-factory). Without
`family` it is `"decoder"`, or `"module"` where `factory` is given. A dash: the architecture has no such setting.
"""
MODULE = """Any custom module, or one of Hugging Face; see [models](../guide/models.md)."""

Schema = dict[str, Any]


def page() -> str:
    """The whole page."""
    schema = Job.model_json_schema()
    kinds: dict[str, Schema] = schema["$defs"]
    lines = [INTRODUCTION, *_models(kinds)]
    for section, field in schema["properties"].items():
        if section not in ("name", "model"):
            lines += _section(section, kinds[_kind(field)[0]], kinds)
    return "\n".join(lines).rstrip() + "\n"


def _models(kinds: dict[str, Schema]) -> Iterator[str]:
    own = [kinds[kind] for kind in FAMILIES.values()]
    names = list(dict.fromkeys(name for kind in own for name in kind["properties"] if name != "family"))
    rows = []
    for name in names:
        having = [kind for kind in own if name in kind["properties"]]
        field = having[0]["properties"][name]
        defaults = [_default(k["properties"][name], name in k["required"]) if k in having else "-" for k in own]
        rows.append([f"`{name}`", _type(field), *defaults, _meaning(field)])
    yield from ["## [model]", "", OWN_MODELS]
    yield from _table(["key", "type", *FAMILIES], rows)
    inner = {
        kind: f"model.{name}" for own_kind in own for name, f in own_kind["properties"].items() for kind in _kind(f)
    }
    for kind, place in inner.items():
        yield from ["", *_section(place, kinds[kind], kinds)]
    fields = {
        k: v for k, v in kinds["UserModuleSettings"]["properties"].items() if k not in ("family", "adapters", "frozen")
    }
    yield from ["", "## [model] with `factory` { #model-with-factory }", "", MODULE, ""]
    yield from _table(["key", "type", "default"], _rows(fields, set(kinds["UserModuleSettings"]["required"])))
    yield from ["", "`frozen` and `[model.adapters]` are those of every model, above.", ""]


def _section(place: str, kind: Schema, kinds: dict[str, Schema]) -> Iterator[str]:
    """A table, and those of the sections inside it."""
    inner = {name: found[0] for name, field in kind["properties"].items() if (found := _kind(field))}
    lists = {name for name in inner if kind["properties"][name].get("type") == "array"}
    plain = {name: field for name, field in kind["properties"].items() if name not in inner or name in lists}
    yield from [f"## [{place}]", "", " ".join(kind["description"].split()), ""]
    yield from _table(["key", "type", "default"], _rows(plain, set(kind.get("required", ()))))
    yield ""
    for name, of in inner.items():
        heading = f"{place}.{name}"
        yield from _section(f"[{heading}]" if name in lists else heading, kinds[of], kinds)


def _rows(fields: dict[str, Schema], required: set[str]) -> list[list[str]]:
    return [
        [f"`{name}`", _type(field), _default(field, name in required), _meaning(field)]
        for name, field in fields.items()
    ]


def _table(head: list[str], rows: list[list[str]]) -> list[str]:
    return [
        f"| {' | '.join([*head, ''])} |",
        "|---" * (len(head) + 1) + "|",
        *(f"| {' | '.join(row)} |" for row in rows),
    ]


def _kind(field: Schema) -> list[str]:
    """The groups of settings that a field holds."""
    parts = [field, *field.get("anyOf", ()), field.get("items", {})]
    return [part["$ref"].rpartition("/")[2] for part in parts if "$ref" in part]


def _type(field: Schema) -> str:
    """`int, at least 1`, and the like."""
    if _kind(field):
        return "list of sections, below" if field.get("type") == "array" else "section, below"
    if "anyOf" in field:
        return " or ".join(_type(part) for part in field["anyOf"] if part.get("type") != "null")
    if "enum" in field:
        return ", ".join(f"`{json.dumps(value)}`" for value in field["enum"])
    if field.get("type") == "array":
        inner = field.get("prefixItems") or [field["items"]]
        return f"two of {_type(inner[0])}" if len(inner) == 2 else f"list of {_type(inner[0])}"
    if inner := field.get("additionalProperties"):
        return f"table of {_type(inner)}" if isinstance(inner, dict) else "table"
    names = {"integer": "int", "number": "float", "string": "text", "boolean": "true or false", "object": "table"}
    words = {"minimum": "at least", "exclusiveMinimum": "above", "maximum": "at most", "exclusiveMaximum": "below"}
    limits = [f"{word} {field[key]:g}" for key, word in words.items() if key in field]
    return ", ".join([names[field["type"]], *limits])


def _default(field: Schema, required: bool) -> str:
    if required:
        return "**needed**"
    value = field.get("default")
    return "*not given*" if value is None else f"`{json.dumps(value)}`"


def _meaning(field: Schema) -> str:
    return " ".join(field.get("description", "").split()).replace("|", "\\|")
