"""Modules that a user's function makes, and checks of the inputs and outputs of any module.
The function `package.module:function` is called with `model.arguments`.
The module's forward takes tokens [R, T] and gives logits, or an object that has `.logits`. It also gets `positions`,
`documents`, `rows`, `source`, `source_documents` and `places` of the batch if its signature names them. A module that
does not name `documents` attends across their borders. A method `loss_sum(batch)` replaces the loss.

Checks of a module, its inputs and its outputs: a mistake raises one sentence where torch would fail deep inside.
Sizes are compared, never values: on a GPU reading values would wait for them, and an index out of range is fatal.

The blocks that a model is made of, such as the layers of a transformer.
"""

import inspect
import sys
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from functools import partial
from importlib import import_module
from pathlib import Path
from typing import Any, cast

import torch
from torch import Tensor, nn

from motet.core.batch import Batch
from motet.core.config_loading import did_you_mean
from motet.core.errors import InputError, check_input
from motet.models.arch.attention_core import attention_exchange


@dataclass(frozen=True)
class DataRequirements:
    """The sizes that the data needs of a model."""

    vocab_size: int  # Entries of the input's vocabulary
    num_classes: int | None = None  # Classes of the output; None if targets are tokens


def check_sequence_length(tokens: Tensor, context: int, setting: str = "model.context") -> None:
    """Raise if the sequence is longer than the context, which is set by `setting`."""
    problem = f"a sequence of {tokens.shape[1]} tokens does not fit {setting} = {context}"
    check_input(tokens.shape[1] <= context, f"{problem}; shorten data.sequence_length or lengthen {setting}")


def check_parameters(parameters: Mapping[str, nn.Parameter], source: str) -> None:
    """Raise if a parameter has no real values; the message begins with `source`."""
    for name, parameter in parameters.items():
        problem = f"{source}: parameter {name!r}"
        has_shape = not isinstance(parameter, nn.parameter.UninitializedParameter)
        check_input(has_shape, f"{problem} has no shape before a first forward; give it a fixed shape")
        check_input(not parameter.is_meta, f"{problem} is on the meta device; give it values on the CPU")
        check_input(not parameter.is_complex(), f"{problem} is complex; keep its real and imaginary part as two")


def check_prediction_shape(predicted: torch.Size, batch: Batch, module: nn.Module) -> None:
    """Raise unless the module predicts once for each target."""
    shape = batch.targets.shape
    problem = f"{type(module).__name__} makes predictions of shape {list(predicted)}, but the targets are {list(shape)}"
    check_input(predicted == shape, f"{problem}; set data.objective to that of the model")


def check_num_logits(num_logits: int, requirements: DataRequirements, module: nn.Module) -> None:
    """Raise if there are fewer logits than possible targets."""
    needed = requirements.num_classes or requirements.vocab_size
    problem = f"{type(module).__name__} gives {num_logits} logits for each target, but there are {needed}"
    targets = "tokens of data.tokenizer" if requirements.num_classes is None else "classes in the data"
    check_input(num_logits >= needed, f"{problem} {targets}; make it {needed} or more")


def with_loss_checks(
    module: nn.Module, loss_sum: Callable[[Batch], object], requirements: DataRequirements | None
) -> Callable[[Batch], Tensor]:
    """The same loss, checked to be one number and, in training, to have a gradient."""
    name, vocab_size = type(module).__name__, requirements and requirements.vocab_size

    def checked(batch: Batch) -> Tensor:
        nonlocal vocab_size
        with _check_embedding_rows(module, batch.tokens, vocab_size) if vocab_size else nullcontext():
            loss = loss_sum(batch)
        vocab_size = None  # checked in the first call
        if not isinstance(loss, Tensor) or loss.numel() != 1:
            kind = f"a tensor of shape {list(loss.shape)}" if isinstance(loss, Tensor) else type(loss).__name__
            problem = f"{name}.loss_sum gives {kind}, not a tensor of one number"
            raise InputError(f"{problem}; sum the weighted losses of the batch")
        check_input(
            loss.requires_grad or not torch.is_grad_enabled(),
            f"the loss of {name} has no gradient: it depends on no trained parameter; "
            "leave out detach(), no_grad() and item() before it, or freeze less",
        )
        return loss

    return checked


@contextmanager
def _check_embedding_rows(module: nn.Module, token_ids: Tensor, vocab_size: int) -> Iterator[None]:
    def check(table: nn.Module, inputs: tuple[Tensor, ...], *, name: str) -> None:
        if inputs and inputs[0].untyped_storage().data_ptr() == token_ids.untyped_storage().data_ptr():
            raise InputError(
                f"{type(module).__name__}.{name} has {table.num_embeddings} rows, but there are {vocab_size} tokens of "
                f"data.tokenizer; make it {vocab_size} rows or more, or take another tokenizer"
            )

    # Hooks would be part of the graphs of compiled blocks, whose forward is replaced.
    in_graphs = {inner for block in find_blocks(module) if "forward" in vars(block) for inner in block.modules()}
    tables = [
        (name, inner)
        for name, inner in module.named_modules()
        if isinstance(inner, nn.Embedding) and inner.num_embeddings < vocab_size and inner not in in_graphs
    ]
    handles = [table.register_forward_pre_hook(partial(check, name=name)) for name, table in tables]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


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
    check_input(isinstance(module, nn.Module), f"{source} returns {type(module).__name__}, not a torch.nn.Module")
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


def asks_for_field(module: nn.Module, name: str) -> bool:
    """Whether the forward of a module gets a field of the batch."""
    return name in inspect.signature(module.forward).parameters


def make_logits_function(module: nn.Module) -> Callable[[Batch], Tensor]:
    """The logits of a batch, from a forward that gets the fields that it names."""
    signature = inspect.signature(module.forward)
    names = [name for name in _OPTIONAL_BATCH_FIELDS if asks_for_field(module, name)]
    if not hasattr(module, "loss_sum"):  # a module with a loss may have any forward
        try:
            signature.bind(None, **dict.fromkeys(names))
        except TypeError as error:
            raise InputError(
                f"{type(module).__name__}.forward{signature} cannot be called on tokens: {error}; besides tokens it "
                f"may ask for {', '.join(_OPTIONAL_BATCH_FIELDS)}, or have defaults"
            ) from None

    def logits(batch: Batch) -> Tensor:
        problem = f"{type(module).__name__}.forward is called on a part of each row, and does not ask for its places"
        is_exchanged = attention_exchange.get() is not None
        is_known = batch.places is None or "places" in names or is_exchanged
        check_input(is_known, f"{problem}; give it an argument `places`")
        values = {name: getattr(batch, name) for name in names}
        if is_exchanged and batch.places is not None and "positions" in names and batch.positions is None:
            values["positions"] = batch.places.expand_as(batch.tokens)
        return extract_logits(module(batch.tokens, **values), module)

    return logits


def extract_logits(output: object, module: nn.Module) -> Tensor:
    """The logits in the output of a forward."""
    logits = getattr(output, "logits", output)
    problem = f"{type(module).__name__}.forward gives {type(output).__name__}, not a tensor of logits"
    check_input(isinstance(logits, Tensor), f"{problem}; return one, or an object that has one as .logits")
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


_LIST_TYPES = (nn.ModuleList, nn.Sequential)


def find_blocks(module: nn.Module) -> list[nn.Module]:
    """The outermost items of lists of modules whose parameters nothing else owns."""
    # Lists inside of items are not split: they may be experts, of which ranks call different ones.
    module_counts = Counter(inner for _, inner in module.named_modules(remove_duplicate=False))
    parameter_counts = Counter(p for _, p in module.named_parameters(remove_duplicate=False))

    def owns_its_parameters(block: nn.Module) -> bool:
        block_parameters = Counter(p for _, p in block.named_parameters(remove_duplicate=False))
        return all(parameter_counts[p] == module_counts[block] * count for p, count in block_parameters.items())

    return [block for block in dict.fromkeys(_list_items(module)) if owns_its_parameters(block)]


def named_blocks(module: nn.Module) -> dict[str, nn.Module]:
    """The blocks of a model by their names."""
    names = {part: name for name, part in module.named_modules()}
    return {names[block]: block for block in find_blocks(module)}


def _list_items(module: nn.Module) -> Iterator[nn.Module]:
    for child in module.children():
        if isinstance(module, _LIST_TYPES) and _is_block(child, in_list=isinstance(module, nn.ModuleList)):
            yield child
        else:
            yield from _list_items(child)


def _is_block(child: nn.Module, in_list: bool) -> bool:
    """Whether a child has parameters and a forward; a single layer of a Sequential is too small."""
    called, large = type(child).forward is not nn.Module.forward, in_list or any(True for _ in child.children())
    return called and large and not isinstance(child, _LIST_TYPES) and any(True for _ in child.parameters())
