"""The public surface changes only on purpose: commands and options, settings of a job, exported names."""

import inspect
import types
from collections.abc import Callable, Iterable, Iterator
from importlib import import_module
from typing import Annotated, Any, Literal, Union, get_args, get_origin, get_type_hints

import pytest
import typer
from golden import compare
from pydantic import BaseModel

import motet
from motet.cli.main import app
from motet.core.errors import EXIT_CODES
from motet.train.job import Job


def commands(command: Any, path: str) -> Iterator[str]:
    """Every command with its parameters."""
    inner = getattr(command, "commands", {})
    parameters = [shown(parameter, command.callback) for parameter in command.params]
    if parameters or not inner:
        yield path
        yield from (f"    {line}" for line in parameters)
    for name in sorted(inner):
        yield from commands(inner[name], f"{path} {name}")


def shown(parameter: Any, function: Callable[..., Any]) -> str:
    """`--ranks: int | None = None`, by what the function says: wording of the library may differ by its version."""
    names = "/".join(parameter.opts) if parameter.param_type_name == "option" else parameter.metavar or parameter.name
    default = inspect.signature(function).parameters[parameter.name].default
    kind = spelled(get_type_hints(function)[parameter.name])
    return f"{names}: {kind}{'' if default is inspect.Parameter.empty else f' = {default!r}'}"


def settings_in(annotation: Any) -> list[type[BaseModel]]:
    if isinstance(annotation, type) and not isinstance(annotation, types.GenericAlias):
        return [annotation] if issubclass(annotation, BaseModel) else []
    return [kind for part in get_args(annotation) for kind in settings_in(part)]


def fields(kind: type[BaseModel], prefix: str) -> Iterator[str]:
    """`section.key: type = default`; where a section has several kinds, the kind stands in brackets."""
    for name, field in kind.model_fields.items():
        inner = settings_in(field.annotation)
        plain = field.annotation in inner
        if not plain:
            yield f"{prefix}{name}: {spelled(field.annotation)}{limits(field.metadata)}{default_of(field)}"
        for part in inner:
            tag = "" if len(inner) == 1 else f"({part.__name__})"
            yield from fields(part, f"{prefix}{name}{tag}.")


def spelled(annotation: Any) -> str:
    """A type as a person would write it, with its limits."""
    if isinstance(annotation, str | int | float | bool):
        return repr(annotation)
    if annotation in (None, type(None)):
        return "None"
    if annotation is ...:
        return "..."
    origin, inner = get_origin(annotation), get_args(annotation)
    if origin is Annotated:
        return spelled(inner[0]) + limits(inner[1:])
    if origin in (Union, types.UnionType, Literal):
        return " | ".join(map(spelled, inner))
    name = getattr(origin or annotation, "__name__", str(annotation))
    return f"{name}[{', '.join(map(spelled, inner))}]" if inner else str(name)


def limits(metadata: Iterable[Any]) -> str:
    found = [part for field in metadata for part in (getattr(field, "metadata", None) or [field])]
    signs = {"ge": ">=", "gt": ">", "le": "<=", "lt": "<"}
    texts = [f"{signs[key]} {getattr(part, key)}" for part in found for key in signs if hasattr(part, key)]
    return f" ({', '.join(texts)})" if texts else ""


def default_of(field: Any) -> str:
    if field.is_required():
        return ""
    return f" = {field.get_default(call_default_factory=True)!r}"


def test_commands_and_options(regenerate: bool) -> None:
    compare("cli.txt", "\n".join(commands(typer.main.get_command(app), "motet")) + "\n", regenerate)


def test_settings_of_a_job(regenerate: bool) -> None:
    compare("job_fields.txt", "\n".join(fields(Job, "")) + "\n", regenerate)


def test_exported_names(regenerate: bool) -> None:
    owners = {name: getattr(motet, name) for name in motet.__all__}
    lines = [f"{name}: {type(value).__name__}" for name, value in sorted(owners.items())]
    compare("exports.txt", "\n".join(lines) + "\n", regenerate)


def test_exit_codes(regenerate: bool) -> None:
    compare("exit_codes.txt", "".join(f"{code}: {text}\n" for code, text in EXIT_CODES.items()), regenerate)


def test_an_unknown_name_is_an_attribute_error() -> None:
    with pytest.raises(AttributeError, match="module 'motet' has no attribute 'nothing'"):
        _ = motet.nothing
    assert set(dir(motet)) == set(motet.__all__) and import_module("motet.train.job").Job is motet.Job
