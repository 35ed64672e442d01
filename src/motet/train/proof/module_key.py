"""The key of a proof about a module: a digest of the module, of the code that it runs, and of settings."""

import inspect
import json
import sys
from collections.abc import Iterator
from functools import partial
from importlib import metadata
from pathlib import Path
from types import ModuleType
from typing import Any

from torch import nn

from motet.train.proof.proof_cache import digest_of_motet, digest_of_texts

_INSTALLED = ("site-packages", "dist-packages")
_PLAIN = bool | int | float | str | None


def proof_key(module: nn.Module, *settings: object) -> str:
    """A digest of a module, of the code that it runs, and of settings that are JSON values."""
    libraries = [f"{name} {metadata.version(name)}" for name in ("torch", "transformers") if name in sys.modules]
    return digest_of_texts(
        json.dumps([*settings, libraries], sort_keys=True, default=str),
        digest_of_motet(),
        *_sources(module),
        *(repr(each) for each in _structure(module)),
    )


def _structure(module: nn.Module) -> Iterator[tuple[object, ...]]:
    """The plain attributes and the tensors of all inner modules."""
    for name, part in module.named_modules():
        plain = sorted((key, value) for key, value in vars(part).items() if isinstance(value, _PLAIN))
        tensors = [
            (key, kind, None if tensor is None else (tuple(tensor.shape), str(tensor.dtype), tensor.requires_grad))
            for kind, by_name in (("parameter", part._parameters), ("buffer", part._buffers))
            for key, tensor in by_name.items()
        ]
        hooks = [len(each) for each in (part._forward_hooks, part._forward_pre_hooks)]
        yield name, type(part).__module__, type(part).__qualname__, plain, tensors, hooks


def _sources(module: nn.Module) -> list[str]:
    """The text of each file with code that the module may run, but for torch and motet, in the order of the names.

    A file of an installed package counts where it defines a class of the module. Any other file also counts where such
    a file imports a name from it.
    """
    files, waiting = dict[str, str](), [owner for part in module.modules() for owner in _owners(part)]
    while waiting:
        owner = waiting.pop()
        path = getattr(owner, "__file__", None)
        if path is None or owner.__name__ in files or _is_digested_otherwise(owner):
            continue
        try:
            files[owner.__name__] = f"{owner.__name__}\n{Path(path).read_text('utf-8')}"
        except (OSError, UnicodeDecodeError):  # A compiled module
            files[owner.__name__] = owner.__name__
        if not any(word in path for word in _INSTALLED):
            waiting += _used_modules(owner)
    return [files[name] for name in sorted(files)]


def _owners(part: nn.Module) -> Iterator[ModuleType]:
    """The Python modules that define the classes of a module, and the functions that it has as attributes."""
    functions = [value for value in vars(part).values() if callable(value) and not isinstance(value, nn.Module)]
    for value in (*type(part).__mro__, *functions):
        if (owner := _owner(value)) is not None:
            yield owner


def _owner(value: Any) -> ModuleType | None:
    while isinstance(value, partial):
        value = value.func
    if isinstance(value, ModuleType):
        return value
    function: Any = inspect.unwrap(value) if callable(value) else value
    return sys.modules.get(getattr(function, "__module__", None) or "")


def _used_modules(owner: ModuleType) -> list[ModuleType]:
    used = (_owner(value) for value in vars(owner).values() if isinstance(value, ModuleType) or callable(value))
    return [each for each in used if each is not None and each is not owner]


def _is_digested_otherwise(owner: ModuleType) -> bool:
    """Whether a version or the digest of motet says what the code is."""
    name = owner.__name__.partition(".")[0]
    return name in ("torch", "motet", "numpy") or name in sys.stdlib_module_names
