"""The key of a proof about a module: a digest of the module, of the code that it may run, and of settings.

Everything that the module refers to is visited in memory: attributes, classes, functions with what they close
over, and the values that are global in the user's files. So a function that was replaced counts, whoever has replaced
it. There is no key, and no proof is kept, where something cannot be visited or has no source file.
"""

import copyreg
import hashlib
import json
import sys
from collections import OrderedDict
from collections.abc import Callable, Iterable
from functools import cached_property
from inspect import GEN_CREATED, getgeneratorstate
from types import CodeType, FunctionType, GeneratorType, MappingProxyType, MethodType, ModuleType
from typing import Any

import torch
from torch import Tensor, nn

from motet.train.proof.followed_sources import (
    UnknownCodeError,
    installed_packages,
    is_installed,
    is_known_by_version,
    source_of,
    texts_of_sources,
)
from motet.train.proof.proof_cache import digest_of_motet, digest_of_texts

_SCALARS = (type(None), bool, int, float, complex, str, bytes)
_MAX_TEXTS, _MAX_DEPTH = 10_000_000, 150
# An attribute of transformers' generation settings: Python's hash, which no two processes share
_VOLATILE = "_original_object_hash"
_COMPILED = "_torchdynamo_orig_callable"  # The function that torch.compile was called on
_HEAP_TYPE = 1 << 9  # A flag in type.__flags__
_HOOKS = {name for name in vars(nn.Module()) if "hooks" in name}
# Names that Python itself sets, some of them only when something is used for the first time
_SET_BY_PYTHON = {"__dict__", "__weakref__", "__doc__", "__module__", "__annotations__", "__dataclass_fields__"}
_SET_BY_PYTHON |= {"__name__", "__qualname__", "__package__", "__file__", "__path__", "__cached__", "__loader__"}
_SET_BY_PYTHON |= {"__spec__", "__builtins__", "__warningregistry__", "__firstlineno__", "__static_attributes__"}
_SET_BY_PYTHON |= {"__orig_bases__", "_abc_impl"}


def proof_key(module: nn.Module, *settings: object, factory: str = "") -> str | None:
    """A digest of a module, of the code that it may run, and of settings that are JSON values.

    None if something cannot be digested. `factory` is the name of the Python module whose function has made it.
    """
    visit = _Visit()
    try:
        visit.value(module)
        visit.modules([factory] if factory else [])
        sources = texts_of_sources(visit.owners)
    except (UnknownCodeError, RecursionError):
        return None
    libraries = [sys.version, *installed_packages()]
    return digest_of_texts(
        json.dumps([*settings, libraries], sort_keys=True, default=str), digest_of_motet(), *sources, *visit.texts
    )


class _Visit:
    """The text of objects, each of which is visited once: later references write its number."""

    def __init__(self) -> None:
        self.texts: list[str] = []
        self.owners: dict[str, None] = {}  # The names of Python modules, in the order in which they were met
        self._numbers: dict[int, int] = {}
        self._kept: list[object] = []  # Held so that no other object gets the id of a visited one
        self._depth = 0

    def value(self, value: Any) -> None:
        """Add any object."""
        kind = type(value)
        if kind in _SCALARS:
            self.texts += [kind.__name__, repr(value)]
            return
        self._depth += 1
        if self._depth > _MAX_DEPTH or len(self.texts) > _MAX_TEXTS:
            raise UnknownCodeError("too much to visit")
        if kind in (tuple, torch.Size):  # Equal ones may be one object or two
            self._items(kind.__name__, value)
        elif kind in (set, frozenset):
            self._items(kind.__name__, sorted(self._text_of(each) for each in value))
        elif kind is CodeType:
            self._code(value)
        elif kind is MethodType:
            self._items("method", (value.__self__, value.__func__))
        elif id(value) in self._numbers:
            self.texts += ["again", str(self._numbers[id(value)])]
        else:
            self._numbers[id(value)] = len(self._numbers)
            self._kept.append(value)
            self._new_object(value)
        self._depth -= 1

    def modules(self, names: Iterable[str]) -> None:
        """Add the values that are global in the user's modules: these, those of visited code, and what they import."""
        self.owners |= dict.fromkeys(names)
        done = set[str]()
        while waiting := [name for name in self.owners if name not in done]:
            for name in waiting:
                done.add(name)
                if (module := sys.modules.get(name)) is None or is_known_by_version(name):
                    continue
                if is_installed(name):
                    self._functions_of(module)
                    continue
                self.texts.append(name)
                for key, value in sorted(vars(module).items()):
                    if key not in _SET_BY_PYTHON and not isinstance(value, ModuleType):
                        self.texts.append(key)
                        self.value(value)
                if (source := source_of(name)) is not None:
                    self.owners |= dict.fromkeys(each for each in source.first_imports if each in sys.modules)

    def _functions_of(self, module: ModuleType) -> None:
        """The code that the functions of a library's file have now; a package fetches its functions when it likes."""
        for name, value in sorted(vars(module).items()):
            if isinstance(value, FunctionType) and not hasattr(module, "__path__"):
                self.texts.append(name)
                self.value(value.__code__)

    def _items(self, kind: str, items: Iterable[object]) -> None:
        items = [*items]
        self.texts += [kind, str(len(items))]
        for each in items:
            self.value(each)

    def _text_of(self, value: object) -> str:
        """The text of an entry of a set, whatever was visited before."""
        visit = _Visit()
        visit._depth = self._depth
        visit.value(value)
        self.owners |= visit.owners
        return digest_of_texts(*visit.texts)

    def _new_object(self, value: Any) -> None:
        kind = type(value)
        if isinstance(value, nn.Module):
            self._module(value)
        elif isinstance(value, Tensor):
            self._tensor(value)
        elif kind is FunctionType:
            self._function(value)
        elif isinstance(value, type):
            self._class(value)
        elif isinstance(value, ModuleType):
            self._owner(value.__name__, vars(value))
        elif (parts := _parts(value)) is not None:
            self._items(kind.__name__, parts)
        else:
            self._other_object(value)

    def _module(self, module: nn.Module) -> None:
        self.value(type(module))
        hooks = sorted({key for name in _HOOKS for key in vars(module).get(name) or ()})
        for name, value in vars(module).items():
            self.texts.append(name)
            # The number of a hook counts all hooks of the process
            self.value({hooks.index(key): hook for key, hook in value.items()} if name in _HOOKS and value else value)

    def _tensor(self, tensor: Tensor) -> None:
        """A tensor with its values, but for parameters of numbers, whose values a proof draws."""
        self.value(type(tensor))
        self.texts += [str(tuple(tensor.shape)), str(tensor.dtype), str(tensor.requires_grad)]
        if not (isinstance(tensor, nn.Parameter) and tensor.is_floating_point()):
            self.texts.append("meta" if tensor.is_meta else _digest_of_values(tensor))
        self.value(vars(tensor))

    def _owner(self, name: str, variables: dict[str, Any] | None = None) -> bool:
        """Follow the Python module of a class or function; whether it is the user's."""
        module = sys.modules.get("_collections_abc" if name == "collections.abc" else name)  # Python renames this one
        if module is None or (variables is not None and vars(module) is not variables):
            raise UnknownCodeError(name)
        self.owners[name] = None
        self.texts.append(name)
        is_users = not is_installed(name)
        if is_users and not (getattr(module, "__file__", None) or hasattr(module, "__path__")):
            raise UnknownCodeError(name)
        return is_users

    def _function(self, function: FunctionType) -> None:
        variables = function.__globals__
        name = str(variables.get("__name__"))
        self.texts.append(function.__qualname__)
        if not name.startswith("namedtuple_"):
            self._owner(name, variables)
        self._code(function.__code__)
        if _COMPILED in vars(function):  # The rest of it is the compiler's state
            self.value(vars(function)[_COMPILED])
            return
        cells = [[cell.cell_contents] if _is_filled(cell) else [] for cell in function.__closure__ or ()]
        for each in (function.__defaults__, function.__kwdefaults__, vars(function), cells):
            self.value(each)

    def _code(self, code: CodeType) -> None:
        """The instructions of a code, without the lines where it stands."""
        names = (code.co_names, code.co_varnames, code.co_freevars, code.co_cellvars)
        counts = (code.co_argcount, code.co_posonlyargcount, code.co_kwonlyargcount, code.co_flags)
        self.texts += [code.co_code.hex(), code.co_exceptiontable.hex(), repr(names), repr(counts)]
        self.value(code.co_consts)

    def _class(self, kind: type) -> None:
        """The functions that a class has now, and all other attributes unless it is a library's."""
        self.texts += ["class", kind.__qualname__]
        is_users = self._owner(kind.__module__) or _is_out_of_place(kind)
        self._items("bases", kind.__mro__[1:])
        if is_users:
            self.value(type(kind))
        for name, value in vars(kind).items():
            is_code = isinstance(value, FunctionType | staticmethod | classmethod | property | cached_property)
            if is_code or (is_users and name not in _SET_BY_PYTHON) or type(value) in _SCALARS:
                self.texts.append(name)
                self.value(value)

    def _other_object(self, value: Any) -> None:
        """An object by its pickled state, with all attributes unless a library's class chooses them."""
        kind = type(value)
        self.value(kind)
        try:
            reduce: Callable[[Any], Any] | None = copyreg.dispatch_table.get(kind)
            parts = reduce(value) if reduce else value.__reduce_ex__(4)
            wrapped = getattr(value, "__wrapped__", None)  # An attribute of functools.lru_cache
        except Exception as error:  # Locks, generators, objects of C++: classes raise what they like
            raise UnknownCodeError(kind.__name__) from error
        self.value(wrapped)
        if isinstance(parts, str):
            self.texts.append(parts)
            return
        function, arguments, state, items, pairs = (*parts, None, None, None)[:5]
        self._items("object", [function, arguments, state, [*(items or ())], [*(pairs or ())]])
        is_chosen = {kind.__reduce__, kind.__reduce_ex__} != {object.__reduce__, object.__reduce_ex__}
        if not (is_chosen and is_installed(kind.__module__)):
            self.value(getattr(value, "__dict__", None))


def _is_out_of_place(kind: type) -> bool:
    """Whether a class that Python code has made is not where its name says, such as one of `exec` without a module."""
    owner: Any = sys.modules[kind.__module__]
    for name in kind.__qualname__.split("."):
        owner = getattr(owner, name, None)
    return bool(kind.__flags__ & _HEAP_TYPE) and owner is not kind


def _parts(value: Any) -> list[Any] | None:
    """The objects that an object of a kind of Python's consists of; None for any other."""
    kind = type(value)
    if kind is list:
        return [*value]
    if kind in (dict, OrderedDict, MappingProxyType):
        return [each for item in value.items() if item[0] != _VOLATILE for each in item]
    if isinstance(value, staticmethod | classmethod):
        return [kind, value.__func__]
    if isinstance(value, property):
        return [kind, value.fget, value.fset, value.fdel]
    if isinstance(value, cached_property):
        return [kind, value.func]
    if kind is GeneratorType and getgeneratorstate(value) == GEN_CREATED:  # Part of a context manager that decorates
        return [value.gi_code, value.gi_frame.f_locals]
    return None


def _is_filled(cell: Any) -> bool:
    try:
        cell.cell_contents  # noqa: B018
    except ValueError:
        return False
    return True


def _digest_of_values(tensor: Tensor) -> str:
    try:
        values = tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy()
    except (RuntimeError, TypeError) as error:  # Sparse and quantized tensors
        raise UnknownCodeError("tensor") from error
    return hashlib.blake2b(values.tobytes(), digest_size=20).hexdigest()
