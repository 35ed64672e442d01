"""A module that a user's function makes: `package.module:function`, called with `model.arguments`.
The module's forward takes tokens [R, T] and gives logits, or an object that has `.logits`. It also gets `positions`,
`documents`, `rows`, `source`, `source_documents` and `places` of the batch if its signature names them. A module that
does not name `documents` attends across their borders. A method `loss_sum(batch)` replaces the loss."""

import inspect
import sys
from collections.abc import Callable
from importlib import import_module
from pathlib import Path
from typing import Any, cast

from torch import Tensor, nn

from motet.core.batch import Batch
from motet.core.config_loading import did_you_mean
from motet.core.errors import InputError, check_input
from motet.models.runtime_checks import check_parameters

_OPTIONAL_BATCH_FIELDS = ("positions", "documents", "rows", "source", "source_documents", "places")


def build_user_module(factory: str, arguments: dict[str, Any], *, on_meta: bool = False) -> nn.Module:
    """The module that the function returns; errors inside the function keep their traceback. With `on_meta`, its
    parameters may be on the meta device."""
    function, source = _import_factory(factory), f"model.factory = {factory!r}"
    try:
        inspect.signature(function).bind(**arguments)
    except TypeError as error:
        raise InputError(f"model.arguments do not fit {factory}: {error}") from None
    except ValueError:
        pass  # a built-in without a signature checks its arguments when it is called
    module: nn.Module = function(**arguments)
    check_input(isinstance(module, nn.Module), f"{source} must return a torch.nn.Module, not {type(module).__name__}")
    for name, submodule in module.named_modules():
        layer = f"{source}: {type(submodule).__name__} {name!r}"
        check_input(
            type(submodule).get_extra_state is nn.Module.get_extra_state,
            f"{layer} keeps state in get_extra_state, which is not saved; keep it in a buffer",
        )
        dropout = submodule.dropout if isinstance(submodule, nn.RNNBase) else 0
        masks = f"has dropout = {dropout}, whose masks cannot follow rows"
        check_input(dropout == 0, f"{layer} {masks}; put nn.Dropout around its layers")
    check_parameters(dict(module.named_parameters()) if not on_meta else {}, source)
    return module


def default_arguments(factory: str) -> dict[str, Any]:
    """The arguments of a function that have defaults."""
    try:
        parameters = inspect.signature(_import_factory(factory)).parameters.values()
    except ValueError:
        return {}  # A built-in without a signature
    return {each.name: each.default for each in parameters if each.default is not each.empty}


def make_logits_function(module: nn.Module) -> Callable[[Batch], Tensor]:
    """The logits of a batch, from a forward that gets the fields that it names."""
    signature = inspect.signature(module.forward)
    names = [name for name in _OPTIONAL_BATCH_FIELDS if name in signature.parameters]
    if not hasattr(module, "loss_sum"):  # with a loss, forward need not fit a batch
        try:
            signature.bind(None, **dict.fromkeys(names))
        except TypeError as error:
            raise InputError(
                f"{type(module).__name__}.forward{signature} cannot be called on tokens: {error}; besides tokens it "
                f"may ask for {', '.join(_OPTIONAL_BATCH_FIELDS)}, or have defaults"
            ) from None

    def logits(batch: Batch) -> Tensor:
        problem = f"{type(module).__name__}.forward is called on a part of each row, and does not ask for its places"
        check_input(batch.places is None or "places" in names, f"{problem}; give it an argument `places`")
        return extract_logits(module(batch.tokens, **{name: getattr(batch, name) for name in names}), module)

    return logits


def extract_logits(output: object, module: nn.Module) -> Tensor:
    """The logits in the output of a forward."""
    logits = getattr(output, "logits", output)
    problem = f"{type(module).__name__}.forward must give a tensor of logits, or an object that has one as .logits, "
    check_input(isinstance(logits, Tensor), f"{problem}not {type(output).__name__}")
    return cast(Tensor, logits)


def _import_factory(factory: str) -> Callable[..., Any]:
    path, colon, name = factory.partition(":")
    setting = f"model.factory = {factory!r}"
    check_input(
        colon and all(part.isidentifier() for part in [*path.split("."), name]),
        f"{setting} is neither 'package.module:function' nor 'hf:' and a folder or config.json",
    )
    current_folder = str(Path.cwd())
    if current_folder not in sys.path:
        sys.path.append(current_folder)  # last, so that no file in it hides an installed module
    try:
        module = import_module(path)
    except ModuleNotFoundError as error:
        if error.name is None or not (path == error.name or path.startswith(f"{error.name}.")):
            raise
        where = "in the current folder or on Python's path"
        raise InputError(f"{setting}: there is no module {error.name!r} {where}") from None
    function: Callable[..., Any] | None = getattr(module, name, None)
    if function is None:
        hint = did_you_mean(name, [n for n in dir(module) if callable(getattr(module, n))])
        raise InputError("; ".join(filter(None, [f"{setting}: {path} has no function {name!r}", hint])))
    check_input(callable(function), f"{setting}: this is {function!r:.40}, which cannot be called; name a function")
    return function
