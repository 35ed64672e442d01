"""A module that a function of the user's makes: `package.module:function`, called with `model.arguments`.

The module's forward takes tokens [R, T] and gives logits, or an object that has `.logits`. It is also given
`positions`, `documents`, `rows`, `source` and `source_documents` of the batch if its signature names them; a module
that does not name `documents` reads across their borders. With a method `loss_sum(batch)`, that is its loss.
"""

import difflib
import inspect
import sys
from collections.abc import Callable, Mapping
from importlib import import_module
from pathlib import Path
from typing import Any

from torch import Tensor, nn

from motet.core.batch import Batch
from motet.core.errors import InputError

_OPTIONAL_BATCH_FIELDS = ("positions", "documents", "rows", "source", "source_documents")


def build_user_module(factory: str, arguments: dict[str, Any]) -> nn.Module:
    """Errors inside of the function are the user's, and keep their traceback."""
    function = _import_factory(factory)
    try:
        inspect.signature(function).bind(**arguments)
    except TypeError as error:
        raise InputError(f"model.arguments do not fit {factory}: {error}") from None
    except ValueError:
        pass  # a built-in without a signature says so itself when it is called
    module = function(**arguments)
    if not isinstance(module, nn.Module):
        raise InputError(f"model.factory = {factory!r} must return a torch.nn.Module, not {type(module).__name__}")
    _check_module(module, factory)
    return module


def make_logits_function(module: nn.Module) -> Callable[[Batch], Tensor]:
    """The logits of a batch, whose forward is given what it asks for."""
    signature = inspect.signature(module.forward)
    accepted_fields = [name for name in _OPTIONAL_BATCH_FIELDS if name in signature.parameters]
    if not hasattr(module, "loss_sum"):  # else the forward may be for others than us
        _check_forward_signature(signature, accepted_fields, module)

    def logits(batch: Batch) -> Tensor:
        return extract_logits(module(batch.tokens, **{name: getattr(batch, name) for name in accepted_fields}), module)

    return logits


def extract_logits(output: object, module: nn.Module) -> Tensor:
    """The logits in what a forward returned."""
    logits = getattr(output, "logits", output)
    if isinstance(logits, Tensor):
        return logits
    raise InputError(
        f"{type(module).__name__}.forward must give a tensor of logits, or an object that has one as .logits, "
        f"not {type(output).__name__}"
    )


def _check_module(module: nn.Module, factory: str) -> None:
    """Only what has values of its own, and real ones, can be trained and saved."""
    for name, submodule in module.named_modules():
        if type(submodule).get_extra_state is not nn.Module.get_extra_state:
            problem = "keeps state in get_extra_state, which is not saved; keep it in a buffer"
        elif isinstance(submodule, nn.RNNBase) and submodule.dropout > 0:
            problem = (
                f"has dropout = {submodule.dropout}, whose masks cannot follow rows; put nn.Dropout around its layers"
            )
        else:
            continue
        raise InputError(f"model.factory = {factory!r}: {type(submodule).__name__} {name!r} {problem}")
    check_parameters(dict(module.named_parameters()), f"model.factory = {factory!r}")


def check_parameters(parameters: Mapping[str, nn.Parameter], source: str) -> None:
    """Of a module that `source` gives."""
    for name, parameter in parameters.items():
        if isinstance(parameter, nn.parameter.UninitializedParameter):
            problem = "has no shape before a first forward; make it of a known shape"
        elif parameter.is_meta:
            problem = "is on the meta device; give it values on the CPU"
        elif parameter.is_complex():
            problem = "is complex; keep its real and imaginary part as two"
        else:
            continue
        raise InputError(f"{source}: parameter {name!r} {problem}")


def _check_forward_signature(signature: inspect.Signature, accepted_fields: list[str], module: nn.Module) -> None:
    try:
        signature.bind(None, **dict.fromkeys(accepted_fields))
    except TypeError as error:
        raise InputError(
            f"{type(module).__name__}.forward{signature} cannot be called on tokens: {error}; beside them it may ask "
            f"for {', '.join(_OPTIONAL_BATCH_FIELDS)}, or have defaults"
        ) from None


def _import_factory(factory: str) -> Callable[..., Any]:
    path, colon, name = factory.partition(":")
    if not colon or not all(part.isidentifier() for part in [*path.split("."), name]):
        raise InputError(
            f"model.factory = {factory!r} is neither 'package.module:function' nor 'hf:' and a folder or config.json"
        )
    current_folder = str(Path.cwd())
    if current_folder not in sys.path:
        sys.path.append(current_folder)  # last, so that no file in it hides an installed module
    try:
        module = import_module(path)
    except ModuleNotFoundError as error:
        if error.name is None or not (path == error.name or path.startswith(f"{error.name}.")):
            raise
        raise InputError(
            f"model.factory = {factory!r}: there is no module {error.name!r} in the current folder or on Python's path"
        ) from None
    function = getattr(module, name, None)
    if function is not None and not callable(function):
        raise InputError(
            f"model.factory = {factory!r}: this is {function!r:.40}, which cannot be called; name a function"
        )
    if function is None:
        near = difflib.get_close_matches(name, [n for n in dir(module) if callable(getattr(module, n))], n=1)
        hint = f"; did you mean {near[0]!r}?" if near else ""
        raise InputError(f"model.factory = {factory!r}: {path} has no function {name!r}{hint}")
    return function  # type: ignore[no-any-return]  # whatever it is, it can be called
