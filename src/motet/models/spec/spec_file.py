"""A model's spec as a file, which `motet show model --trace --output` writes and `motet plan --model` reads."""

from collections.abc import Iterator
from dataclasses import fields, is_dataclass
from itertools import chain
from pathlib import Path

from pydantic import TypeAdapter, ValidationError
from pydantic.dataclasses import dataclass

from motet.core.errors import InputError, check_input, convert_os_errors
from motet.core.text_files import MAX_WHOLE_NUMBER, write_file_atomically
from motet.core.units import DTYPE_BYTES
from motet.models.spec.layer_specs import BlockSpec, MicroBatchShape
from motet.models.spec.model_spec import ModelSpec

_FORMAT = "motet model 1"
_REMEDY = "write it again with `motet show model JOB --trace --output FILE`"


@dataclass(frozen=True)
class SpecFile:
    """The content of a file."""

    format: str
    source: str  # The job or config of the model
    dtype: str  # The dtype in which the module computed; other dtypes are approximations
    spec: ModelSpec


_ADAPTER = TypeAdapter(SpecFile)
_FROM_ZERO = ("first_index", "split_dim", "elements")  # All other whole numbers are sizes
_DTYPES = ("compute", "wide", *DTYPE_BYTES)


def write_spec_file(path: Path, spec: ModelSpec, *, source: str, dtype: str) -> None:
    """Write a spec."""
    text = _ADAPTER.dump_json(SpecFile(_FORMAT, source, dtype, spec), exclude_defaults=True, indent=1)
    with convert_os_errors(f"write {path}", "give the path of a file in an existing folder"):
        write_file_atomically(path, text + b"\n")


def read_spec_file(path: Path) -> SpecFile:
    """Read a spec, and check that its sizes can be those of a model."""
    with convert_os_errors(f"read {path}", "give a file that `motet show model --output` wrote"):
        text = path.read_bytes()
    try:
        file = _ADAPTER.validate_json(text)
    except ValidationError as error:
        problem = error.errors(include_url=False)[0]
        place = ".".join(str(part) for part in problem["loc"]) or "its text"
        raise InputError(f"{path} is not a model: {place}: {problem['msg']}; {_REMEDY}") from None
    check_input(file.format == _FORMAT, f"{path}: format = {file.format!r} is not {_FORMAT!r}; {_REMEDY}")
    wrong = next(chain(_problems(file.spec, "spec"), _ambiguous_names(file.spec)), None)
    check_input(wrong is None, f"{path} is not a model: {wrong}; {_REMEDY}")
    shape = MicroBatchShape(1, 1, 1)
    numbers = [block.repeat for block in file.spec.blocks]
    numbers += [file.spec.parameter_count, file.spec.forward_flops(shape)]
    numbers += [tensor.bytes(shape, "float32") + 1 for block in file.spec.blocks for tensor in block.layer.saved]
    absurd = next((number for number in numbers if not 0 < number <= MAX_WHOLE_NUMBER), None)
    check_input(numbers and absurd is None, f"{path} is not a model: a size in it is {absurd}; {_REMEDY}")
    return file


def _ambiguous_names(spec: ModelSpec) -> Iterator[str]:
    """Names of several blocks with different layers. `motet plan` compares stages by the names of their blocks."""
    layers = {block.name: block.layer for block in reversed(spec.blocks)}
    for index, block in enumerate(spec.blocks):
        if block.layer != layers[block.name]:
            yield f"spec.blocks.{index}.name = {block.name!r} is that of another layer; give it another name"


def _problems(value: object, key: str) -> Iterator[str]:
    """The values below a key that no model has."""
    name = key.rpartition(".")[2]
    if isinstance(value, int) and not isinstance(value, bool):
        least = 0 if name in _FROM_ZERO else 1
        if value < least:
            yield f"{key} = {value} must be at least {least}"
    elif name == "dtype" and value not in _DTYPES:
        yield f"{key} = {value!r} is not a dtype"
    elif isinstance(value, BlockSpec) and value.input is not None and "{i}" not in value.prefix:
        yield f"{key}.prefix = {value.prefix!r} has no {{i}} for the index of a block"
    if is_dataclass(value):
        for each in fields(value):
            yield from _problems(getattr(value, each.name), f"{key}.{each.name}")
    elif isinstance(value, tuple):
        for index, each in enumerate(value):
            yield from _problems(each, f"{key}.{index}")
