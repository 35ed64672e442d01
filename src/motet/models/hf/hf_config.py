"""Settings from a Hugging Face config.json, without transformers and without torch.
They give the sizes of the model that transformers would build: parameters, FLOPs and activations. Values that change no
size (most rotary scaling, scaled logits, routing details) are omitted, so a model is trained with `factory = "hf:..."`,
not from these settings. Absent keys get the defaults of transformers."""

from pathlib import Path
from typing import Any

from pydantic import ValidationError

from motet.core.errors import InputError, check_input, convert_os_errors
from motet.core.text_formats import parse_json
from motet.models.hf.config_families import COMMON, FAMILIES
from motet.models.hf.config_values import ConfigValues
from motet.models.hf.more_families import MORE_FAMILIES
from motet.models.settings import TransformerSettings

_FAMILIES = FAMILIES | MORE_FAMILIES


def settings_from_config(config: dict[str, Any]) -> TransformerSettings:
    """The settings of one of motet's architectures that has the sizes of the model of `config`."""
    kind = config.get("model_type")
    family = _FAMILIES.get(kind) if isinstance(kind, str) else None
    if family is None:
        raise InputError(
            f"config.json: the sizes of model_type = {kind!r} are unknown; known are {', '.join(sorted(_FAMILIES))}; "
            "`motet show model hf:FOLDER --trace` finds those of others"
        )
    named = {family.aliases.get(key, key): value for key, value in config.items()}
    c = ConfigValues({**COMMON, **family.defaults, **named})
    known = family.class_names.split()
    classes = named.get("architectures") or known
    is_known = isinstance(classes, list) and classes[0] in known
    c.check("architectures", is_known, f"for {kind}, sizes are known of {' and '.join(known)}")
    values = {name: value for read in family.readers for name, value in read(c).items()}
    try:
        return family.settings.model_validate({**values, **family.fixed})
    except ValidationError as error:
        problem = error.errors(include_url=False)[0]
        path = ".".join(str(part) for part in problem["loc"])
        raise InputError(
            f"config.json of a {kind}: {path} = {problem['input']!r}: {problem['msg'].removeprefix('Value error, ')}"
        ) from None


def known_model_types() -> frozenset[str]:
    """The values of `model_type` whose sizes are known."""
    return frozenset(_FAMILIES)


def read_config(path: str | Path) -> dict[str, Any]:
    """The config of a Hugging Face folder, or of the path of its config.json."""
    file = Path(path, "config.json") if Path(path).is_dir() else Path(path)
    with convert_os_errors(f"read {file}", "give a folder with a config.json, or its path"):
        text = file.read_bytes()
    try:
        config: dict[str, Any] = parse_json(text)
    except ValueError as error:
        raise InputError(f"{file} is not valid JSON: {error}") from None
    what = f"a {type(config).__name__}; a config is a JSON object with a model_type"
    check_input(isinstance(config, dict), f"{file} holds {what}")
    return config
