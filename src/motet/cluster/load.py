"""Reads a `Cluster` from a TOML file or by the name of a preset, and says in a sentence what is wrong with it."""

import difflib
import json
import tomllib
from collections.abc import Sequence
from importlib import resources
from math import prod
from pathlib import Path
from typing import Any

from pydantic import BaseModel, ValidationError

from motet.cluster.build import build_cluster
from motet.cluster.cluster import Cluster
from motet.cluster.settings import ClusterSettings
from motet.core.errors import InputError


def cluster_presets() -> dict[str, str]:
    """Name -> TOML text of the clusters that come with motet."""
    folder = resources.files("motet.cluster") / "presets"
    texts = {f.name.removesuffix(".toml"): f.read_text() for f in folder.iterdir() if f.name.endswith(".toml")}
    return dict(sorted(texts.items()))


def load_cluster(
    source: str,
    *,
    hosts: int | None = None,
    devices_per_host: int | None = None,
    dims: Sequence[int] | None = None,
) -> Cluster:
    """The cluster of a TOML file or of a preset, made larger or smaller: `load_cluster("dgx-h100", hosts=16)`.

    `dims` resizes a torus, and with it the number of devices (or hosts) that it joins.
    """
    tree = _read(source)
    if dims is not None:
        _resize_torus(tree, list(dims), source)
    sizes = {"hosts": hosts, "devices_per_host": devices_per_host}
    tree |= {key: value for key, value in sizes.items() if value is not None}
    return cluster_from_tree(tree, source)


def cluster_from_tree(tree: dict[str, Any], source: str = "cluster") -> Cluster:
    """The cluster that plain nested values describe, as TOML gives them."""
    try:
        # Through JSON, because strict validation takes a list for a tuple only there.
        settings = ClusterSettings.model_validate_json(json.dumps(tree, default=str))
    except ValidationError as error:
        problems = (_problem(dict(detail)) for detail in error.errors(include_url=False)[:5])
        raise InputError(f"{source}: {'; '.join(dict.fromkeys(problems))}") from None
    try:
        return build_cluster(settings, Path(source).stem)
    except InputError as error:
        raise InputError(f"{source}: {error}") from None


def _read(source: str) -> dict[str, Any]:
    presets = cluster_presets()
    if source in presets:
        return tomllib.loads(presets[source])
    try:
        text = Path(source).read_bytes().decode("utf-8-sig")
    except (FileNotFoundError, IsADirectoryError, NotADirectoryError, ValueError) as error:
        if isinstance(error, UnicodeDecodeError):
            raise InputError(f"cluster {source} is not UTF-8 text; save it as UTF-8") from None
        near = difflib.get_close_matches(source, presets, n=1)
        hint = f"did you mean {near[0]!r}? " if near else ""
        raise InputError(f"no cluster {source!r}: {hint}it is neither a file nor one of {', '.join(presets)}") from None
    except OSError as error:
        raise InputError(f"cannot read cluster {source}: {error.strerror}; give another TOML file") from None
    try:
        return tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        raise InputError(f"cluster {source} is not valid TOML: {error}; mend it there") from None


def _resize_torus(tree: dict[str, Any], dims: list[int], source: str) -> None:
    for section, size in (("inside", "devices_per_host"), ("between", "hosts")):
        network = tree.get(section)
        if isinstance(network, dict) and network.get("kind") == "torus":
            tree |= {section: {**network, "dims": dims}, size: prod(dims)}
            return
    raise InputError(f"{source}: dims = {dims} is for a torus, which this cluster has not; give hosts=...")


# --- sentences about what is wrong -----------------------------------------------------------------


def _problem(detail: dict[str, Any]) -> str:
    place = [str(part) for part in detail["loc"]]
    kind = place.pop(1) if len(place) > 1 and place[0] in ("inside", "between") else ""  # the kind, which is no key
    key = ".".join(place)
    match detail["type"]:
        case "extra_forbidden":
            valid = sorted(_keys_beside(place, kind))
            near = difflib.get_close_matches(place[-1], valid, n=1)
            return f"unknown key {key!r}; " + (
                f"did you mean {near[0]!r}?" if near else f"valid here: {', '.join(valid)}"
            )
        case "missing":
            return f"{key} is missing; give it a value, e.g. {key} = ..."
        case "union_tag_invalid":
            near = difflib.get_close_matches(str(detail["ctx"]["tag"]), _kinds(key), n=1)
            hint = f"; did you mean {near[0]!r}?" if near else ""
            return f"{key}.kind = {detail['ctx']['tag']!r} must be one of {detail['ctx']['expected_tags']}{hint}"
        case "union_tag_not_found":
            return f"{key}.kind is missing; give one of {', '.join(_kinds(key))}"
        case other:
            return f"{key} = {detail['input']!r} {_MUST.get(other, detail['msg']).format(**detail.get('ctx', {}))}"


_MUST = {
    "greater_than_equal": "must be at least {ge}",
    "greater_than": "must be more than {gt}",
    "finite_number": "must be a finite number",
    "int_type": "must be a whole number",
    "float_type": "must be a number",
    "bool_type": "must be true or false",
    "string_type": "must be a text",
    "literal_error": "must be {expected}",
    "tuple_type": "must be a list, [...]",
    "too_short": "must have at least {min_length} entries",
    "dict_type": "must be a section with keys of its own",
    "model_type": "must be a section with keys of its own",
    "model_attributes_type": "must be a section with keys of its own",
}


def _keys_beside(place: list[str], kind: str) -> set[str]:
    """The keys that are valid where an unknown one was found."""
    model: type[BaseModel] = ClusterSettings
    for part in place[:-1]:
        options = _models_in(model.model_fields[part].annotation)
        model = next((m for m in options if kind and kind in _tags(m)), options[0])
    return set(model.model_fields)


def _kinds(section: str) -> list[str]:
    return [tag for model in _models_in(ClusterSettings.model_fields[section].annotation) for tag in _tags(model)]


def _tags(model: type[BaseModel]) -> tuple[str, ...]:
    field = model.model_fields.get("kind")
    return tuple(getattr(field.annotation, "__args__", ())) if field else ()


def _models_in(annotation: Any) -> list[type[BaseModel]]:
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return [annotation]
    return [model for part in getattr(annotation, "__args__", ()) for model in _models_in(part)]
