"""A job: everything that a run is made of, as one frozen value from one TOML file.

Read with `load_job("tiny", ["run.steps=20"])`. Whatever is wrong is told in one sentence with the nearest valid key.
"""

import difflib
import json
import re
import tomllib
from importlib import resources
from pathlib import Path
from typing import Annotated, Any

from pydantic import BaseModel, Field, ValidationError, model_validator

from motet.checkpoint.settings import CheckpointSettings
from motet.core.errors import InputError
from motet.core.settings import Settings
from motet.data.settings import DataSettings
from motet.models.settings import ModelSettings
from motet.monitor.settings import MonitorSettings
from motet.parallel.layout import LayoutSettings
from motet.precision.recipe import PrecisionSettings
from motet.train.idle import drop_replaced, refuse_idle
from motet.train.settings import OptimizerSettings, RunSettings


class Job(Settings):
    """One training run."""

    name: Annotated[str, Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]*$")]
    model: ModelSettings
    data: DataSettings = DataSettings()
    layout: LayoutSettings = LayoutSettings()
    precision: PrecisionSettings = PrecisionSettings()
    optimizer: OptimizerSettings = OptimizerSettings()
    checkpoint: CheckpointSettings = CheckpointSettings()
    monitor: MonitorSettings = MonitorSettings()
    run: RunSettings = RunSettings()

    @model_validator(mode="after")
    def _length_is_given_once(self) -> "Job":
        if (self.run.steps is None) == (self.run.epochs is None):
            given = (
                f"both run.steps = {self.run.steps} and run.epochs = {self.run.epochs}" if self.run.steps else "neither"
            )
            raise ValueError(f"a run needs either run.steps or run.epochs; {given} given")
        return self


def builtin_jobs() -> dict[str, str]:
    """Name -> TOML text of the jobs that come with motet."""
    folder = resources.files("motet.train") / "jobs"
    texts = {f.name.removesuffix(".toml"): f.read_text() for f in folder.iterdir() if f.name.endswith(".toml")}
    return dict(sorted(texts.items()))


def load_job(source: str, overrides: list[str] | None = None) -> Job:
    """The job of a TOML file or of a built-in name, with `section.key=value` overrides applied.

    Here a person has written each setting, so one that does nothing is refused.
    """
    tree = _read(source)
    overridden = [_override(tree, override) for override in overrides or []]
    drop_replaced(tree, overridden)
    job = job_from_tree(tree, source)
    refuse_idle(job, source)
    return job


def job_from_tree(tree: dict[str, Any], source: str = "job") -> Job:
    """Validate plain nested values, as TOML gives them."""
    model = tree.get("model")
    if isinstance(model, dict) and "family" not in model:
        tree = {**tree, "model": {"family": "module" if "factory" in model else "decoder", **model}}
    optimizer = tree.get("optimizer")
    if isinstance(optimizer, dict) and optimizer.get("clip_norm") is False:
        tree = {**tree, "optimizer": {**optimizer, "clip_norm": None}}
    try:
        # Through JSON, because strict validation takes a list for a tuple only there.
        return Job.model_validate_json(json.dumps(tree, default=str))
    except ValidationError as error:
        raise InputError(f"{source}: {_sentence(error, tree)}") from None


def _read(source: str) -> dict[str, Any]:
    builtin = builtin_jobs()
    if source in builtin:
        return tomllib.loads(builtin[source])
    if not is_file(source):
        near = difflib.get_close_matches(source, builtin, n=1)
        hint = f"did you mean {near[0]!r}? " if near else ""
        if is_file(f"{source}/job.toml"):
            hint = f"to continue the run in this folder, say --resume-from {source}; "
        raise InputError(f"no job {source!r}: {hint}it is neither a file nor one of {', '.join(builtin)}")
    try:
        tree = tomllib.loads(Path(source).read_bytes().decode("utf-8-sig"))
    except OSError as error:
        raise InputError(f"cannot read job {source}: {error.strerror}; give another TOML file") from None
    except UnicodeDecodeError as error:
        line = error.object.count(b"\n", 0, error.start) + 1
        raise InputError(
            f"job {source} is not UTF-8 text: byte 0x{error.object[error.start]:02x} in line {line}; save it as UTF-8"
        ) from None
    except tomllib.TOMLDecodeError as error:
        raise InputError(f"job {source} is not valid TOML: {error}; mend it there") from None
    tree.setdefault("name", Path(source).stem)
    return tree


def is_file(text: str) -> bool:
    """Whether a word of the command line names a file; `Path.is_file` raises at what no file can be called."""
    try:
        return Path(text).is_file()
    except (OSError, ValueError):
        return False


def _override(tree: dict[str, Any], override: str) -> str:
    """Put one value into the tree, and say at which key."""
    key, equals, text = override.partition("=")
    path = key.strip().split(".")
    if not equals or not all(path):
        raise InputError(f"override {override!r} is not of the form section.key=value, e.g. run.steps=100")
    node = tree
    for part in path[:-1]:
        node = node.setdefault(part, {})
        if not isinstance(node, dict):
            raise InputError(f"override {override!r}: {part!r} is a value, not a section")
    node[path[-1]] = _value(text.strip())
    if path in (["run", "steps"], ["run", "epochs"]):  # the length given last is the one that counts
        node.pop("epochs" if path[-1] == "steps" else "steps", None)
    return ".".join(path)


def _value(text: str) -> Any:
    """A TOML value, or the text itself where it is none (so that no shell needs nested quotes)."""
    try:
        return tomllib.loads(f"value = {text}")["value"]
    except tomllib.TOMLDecodeError:
        return text


# --- sentences about what is wrong -----------------------------------------------------------------


def _sentence(error: ValidationError, tree: dict[str, Any]) -> str:
    """All problems in one sentence each, the unknown keys with the nearest valid one."""
    problems = (_problem(dict(detail), tree) for detail in error.errors(include_url=False)[:5])
    return "; ".join(dict.fromkeys(problems))


def _problem(detail: dict[str, Any], tree: dict[str, Any]) -> str:
    place = [str(part) for part in detail["loc"]]
    key = ".".join(_without_union_tags(place, tree))
    match detail["type"]:
        case "extra_forbidden":
            valid = sorted(_keys_beside(place))
            near = difflib.get_close_matches(place[-1], valid, n=1)
            return f"unknown key {key!r}" + (
                f"; did you mean {near[0]!r}?" if near else f"; valid here: {', '.join(valid)}"
            )
        case "missing" if place[-1].isdigit():  # of a list
            return f"{key.rpartition('.')[0]} = {detail['input']!r} has too few values"
        case "missing":
            return f"{key} is missing; give it a value, e.g. {key}=..."
        case "value_error":
            return str(detail["ctx"]["error"])
        case "union_tag_invalid":
            return f"model.family = {detail['ctx']['tag']!r} must be one of {detail['ctx']['expected_tags']}"
        case kind:
            where = f"{key} = {detail['input']!r}" if key else "the job"
            return f"{where} {_must(kind, detail)}"


_MUST = {
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
    "tuple_type": "must be a list, [...]",
    "too_short": "must have at least {min_length} entries",
    "too_long": "must have at most {max_length} entries",
    "model_type": "must be a section with keys of its own",
    "model_attributes_type": "must be a section with keys of its own",
    "dict_type": "must be a section with keys of its own",
}


def _must(kind: str, detail: dict[str, Any]) -> str:
    """What a value has to be, in the words of a job; pydantic's own for what no setting has had yet."""
    if kind == "literal_error":
        expected = detail["ctx"]["expected"]
        near = difflib.get_close_matches(str(detail["input"]), re.findall("'([^']*)'", expected), n=1, cutoff=0.8)
        return f"must be {expected}" + (f"; did you mean {near[0]!r}?" if near else "")
    if kind in _MUST:
        return _MUST[kind].format(**detail.get("ctx", {}))
    return str(detail["msg"])


def _without_union_tags(place: list[str], tree: dict[str, Any]) -> list[str]:
    """`model.decoder.hidden` -> `model.hidden`: pydantic names the kind of model, which is no key."""
    tag = tree.get("model", {}).get("family") if isinstance(tree.get("model"), dict) else None
    return [place[0], *place[2:]] if len(place) > 1 and place[0] == "model" and place[1] == tag else place


def _keys_beside(place: list[str]) -> set[str]:
    """The keys that are valid where an unknown one was found."""
    types: list[Any] = [Job]
    for part in place[:-1]:
        fields = [t.model_fields[part].annotation for t in types if part in getattr(t, "model_fields", {})]
        inner = [t for f in fields for t in _settings_in(f)]
        # A part that is no field is an index or the tag of a union: it narrows, or stays.
        types = inner or [t for t in types if _tag(t) in (None, part)]
    return {name for t in types for name in t.model_fields}


def _settings_in(annotation: Any) -> list[type[BaseModel]]:
    if isinstance(annotation, type):
        return [annotation] if issubclass(annotation, BaseModel) else []
    return [t for part in getattr(annotation, "__args__", ()) for t in _settings_in(part)]


def _tag(kind: type[BaseModel]) -> str | None:
    field = kind.model_fields.get("family")
    return str(field.default) if field else None
