"""The correspondence of a model to its smaller twin: which block of the twin stands for each block, and their sizes.

A block of the twin stands for a block of the model if both have the same modules, the same attributes but for sizes,
and call the same operators in the same order, in the forward of either at its own sizes, and if one size of the twin
stands for one size of the model wherever it occurs, in parameters and in results of operators. A model that takes
another path through its code at its full width therefore has no twin.
"""

import math
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, NoReturn

from torch import nn

from motet.models.trace.model_trace import OperatorCall, OperatorRecorder

# Parts of names of attributes that give the position of a block, or whether transformers has drawn values.
_NUMBERS_OF_PLACES = ("layer", "idx", "index", "training", "_is_hf_initialized")
_KINDS_OF_SIZES = ("parameters", "attributes", "activations")  # The first of these that knows a size decides


class TwinMismatchError(Exception):
    """The twin does not stand for the model, for the reason in the text."""


@dataclass(frozen=True)
class TracedModule:
    """A module, and the operators of a forward of it without memory."""

    module: nn.Module
    operators: OperatorRecorder

    @property
    def blocks(self) -> list[str]:
        """The names of its blocks, in the order in which a forward calls them."""
        return self.operators.blocks

    @cached_property
    def places(self) -> dict[str, tuple[str, bool, bool]]:
        """(The list of each block, whether it is the first one there, whether it is the last)."""
        lists = defaultdict[str, list[str]](list)
        for block in self.blocks:
            lists[block.rpartition(".")[0]].append(block)
        return {
            block: (name, block == blocks[0], block == blocks[-1]) for name, blocks in lists.items() for block in blocks
        }

    @cached_property
    def kinds(self) -> dict[str, object]:
        """A value for each block that is equal for blocks which differ only in sizes."""
        return {
            block: (self.places[block], self._structure(block), self._calls(block), self.calls_after(block))
            for block in self.blocks
        }

    @cached_property
    def outside(self) -> object:
        """A value that is equal for models whose parts outside of blocks differ only in sizes."""
        return self._structure(""), self.calls_after("")

    def parts(self, block: str) -> Iterator[tuple[str, nn.Module]]:
        """The modules of a block by their paths in it; for an empty name, those outside of blocks."""
        if block:
            yield from self.module.get_submodule(block).named_modules()
            return
        lists = {name for name, _, _ in self.places.values()} - {""}
        inside = tuple(f"{name}." for name in (*lists, *self.blocks))
        for name, part in self.module.named_modules():
            if name not in self.places and not name.startswith(inside):
                yield name, part

    def _structure(self, block: str) -> tuple[object, ...]:
        return tuple(
            (name, type(part), _plain_attributes(part), _tensor_ranks(part)) for name, part in self.parts(block)
        )

    def _calls(self, block: str) -> tuple[object, ...]:
        return tuple((each.module, each.operator, *each.options) for each in self.operators.inside[block])

    def sizes(self, block: str) -> object:
        """A value that is equal for blocks of one kind that have the same sizes."""
        module = self.module.get_submodule(block)
        numbers = tuple(
            (name, key, value)
            for name, part in module.named_modules()
            for key, value in vars(part).items()
            if type(value) is int and not _is_place(key)
        )
        shapes = tuple(each.shapes for each in self.operators.inside[block])
        return tuple(p.shape for p in module.parameters()), numbers, shapes

    def calls_after(self, block: str) -> tuple[object, ...]:
        """The operators between a block and the next one."""
        return tuple((each.module, each.operator, *each.options) for each in self.operators.after[block])


def _plain_attributes(part: nn.Module) -> tuple[object, ...]:
    plain = (
        (name, value if isinstance(value, bool | str) else value is None)
        for name, value in vars(part).items()
        if (value is None or isinstance(value, bool | str)) and not _is_place(name)
    )
    return tuple(sorted(plain, key=str))


def _tensor_ranks(part: nn.Module) -> tuple[object, ...]:
    tensors = {**part._parameters, **part._buffers}
    return tuple((name, None if tensor is None else tensor.ndim) for name, tensor in sorted(tensors.items()))


def _is_place(name: str) -> bool:
    return any(word in name for word in _NUMBERS_OF_PLACES)


@dataclass
class SizePairs:
    """Sizes of the twin, each with those of the model at the same places."""

    by_kind: Mapping[str, dict[int, set[int]]] = field(
        default_factory=lambda: {kind: defaultdict(set) for kind in _KINDS_OF_SIZES}
    )

    def add(self, kind: str, small: Sequence[int], large: Sequence[int]) -> None:
        """Add sizes that are at the same places."""
        for a, b in zip(small, large, strict=True):
            self.by_kind[kind][a].add(b)

    def is_known(self, small: int) -> bool:
        """Whether a single size of the model is at the places of this one."""
        return len(self._at_places_of(small)) == 1

    def full_size(self, small: int) -> int:
        """The size of the model for one of the twin."""
        sizes = self._at_places_of(small)
        if len(sizes) != 1:
            known = " or ".join(map(str, sorted(sizes))) or "none"
            raise TwinMismatchError(f"a size of {small} stands for {known} of the model's")
        return next(iter(sizes))

    def explain(self, small: int, large: int) -> bool:
        """Whether a size that stands for several is, in this place, a known one, or a product, quotient or sum of two
        known ones: heads of all rows, say, or heads with the key heads twice."""
        named = (self.by_kind[kind].items() for kind in ("parameters", "attributes"))
        known = {(a, b) for items in named for a, sizes in items for b in sizes}
        # Rows, tokens, numbers of parts
        known |= {(2, 2), *((n, n) for n, sizes in self.by_kind["activations"].items() if n in sizes)}
        return (small, large) in known or any(
            (small % a == 0 and large % b == 0 and (small // a, large // b) in known)
            or (small * a, large * b) in known
            or any((small - times * a, large - times * b) in known for times in (1, 2))
            for a, b in known
            if a and b
        )

    def _at_places_of(self, small: int) -> set[int]:
        return next((self.by_kind[kind][small] for kind in _KINDS_OF_SIZES if small in self.by_kind[kind]), set())


class TwinMatch:
    """A model and its twin, each block of which stands for some of the model's; raises TwinMismatchError."""

    def __init__(self, full: TracedModule, twin: TracedModule, degree: int) -> None:
        self.full, self.twin, self._degree = full, twin, degree
        if full.outside != twin.outside:
            _refuse("the parts outside of its blocks", full.outside, twin.outside)
        by_kind = defaultdict[object, list[str]](list)
        for block, kind in twin.kinds.items():
            by_kind[kind].append(block)
        self.sizes = {"": self._pairs("", "")}
        self.twin_of = dict[str, str]()  # Block of the model -> the block of the twin that stands for it
        known = dict[object, tuple[str, SizePairs]]()
        for block, kind in full.kinds.items():
            key = kind, full.sizes(block)
            if key not in known:
                known[key] = self._stand_in(block, by_kind[kind])
            self.twin_of[block], self.sizes[block] = known[key]

    def _stand_in(self, block: str, candidates: Sequence[str]) -> tuple[str, SizePairs]:
        if not candidates:
            place = self.full.places[block]
            alike = next((each for each in self.twin.blocks if self.twin.places[each] == place), None)
            if alike is None:
                raise TwinMismatchError(f"the twin has no block in the place of {block}")
            _refuse(f"block {block}", self.full.kinds[block], self.twin.kinds[alike])
        problem = TwinMismatchError()
        for candidate in candidates:
            try:
                return candidate, self._pairs(block, candidate)
            except TwinMismatchError as error:
                problem = error
        raise problem

    def _pairs(self, block: str, stand_in: str) -> SizePairs:
        """The sizes of the twin and of the model at the same places of two blocks."""
        pairs, parts_of_twin = SizePairs(), dict(self.twin.parts(stand_in))
        for name, part in self.full.parts(block):
            _add_sizes_of_part(pairs, parts_of_twin[name], part)
        for calls, twin_calls in self._calls(block, stand_in):
            for call, small in zip(calls, twin_calls, strict=True):
                for shape, small_shape in zip(call.shapes, small.shapes, strict=False):
                    if len(shape) == len(small_shape):
                        pairs.add("activations", small_shape, shape)
        self._check_sizes(pairs, f"in {block}" if block else "outside of blocks")
        return pairs

    def _check_sizes(self, pairs: SizePairs, where: str) -> None:
        """Refuse a size of the twin that stands for several of the model, or that ranks divide differently."""
        for small_size, sizes in pairs.by_kind["activations"].items():
            strange = [size for size in sizes if not pairs.explain(small_size, size)] if len(sizes) > 1 else []
            if strange and small_size > 1:  # Any size may stand in the place of one that is broadcast
                names = " and ".join(map(str, sorted(sizes)))
                raise TwinMismatchError(f"{where}, results of {names} elements are all {small_size} in the twin")
        for small_size, sizes in pairs.by_kind["parameters"].items():
            if len(sizes) > 1:
                text = f"{where}, dimensions of {sorted(sizes)} elements are all {small_size} in the twin"
                raise TwinMismatchError(text)
            if math.gcd(*sizes, self._degree) != math.gcd(small_size, self._degree):
                raise TwinMismatchError(
                    f"{where}, {self._degree} ranks divide {min(sizes)} elements and the {small_size} of the twin in "
                    "another way"
                )

    def _calls(self, block: str, stand_in: str) -> Iterator[tuple[list[OperatorCall], list[OperatorCall]]]:
        if block:
            yield self.full.operators.inside[block], self.twin.operators.inside[stand_in]
        yield self.full.operators.after[block], self.twin.operators.after[stand_in]

    def border_like(self, block: int) -> int:
        """The number of the twin's block whose border with the block before is like that of one of the model."""
        border = self._border(self.full, block)
        alike = (i for i in range(1, len(self.twin.blocks)) if self._border(self.twin, i) == border)
        if (number := next(alike, None)) is None:
            names = f"{self.full.blocks[block - 1]} and {self.full.blocks[block]}"
            raise TwinMismatchError(f"no two neighbouring blocks of the twin stand for {names}")
        return number

    @staticmethod
    def _border(of: TracedModule, number: int) -> object:
        before, block = of.blocks[number - 1], of.blocks[number]
        return of.kinds[before], of.kinds[block], of.operators.border(block)

    def block_around(self, name: str) -> str:
        """The block of the model that is, or holds, a module or tensor; empty if none does."""
        if name in self.twin_of:
            return name
        return next((block for block in self._prefixes(name) if block in self.twin_of), "")

    @staticmethod
    def _prefixes(name: str) -> Iterator[str]:
        while name:
            name = name.rpartition(".")[0]
            yield name

    def name_in_twin(self, name: str) -> str:
        """The name of the twin's module or tensor that stands for one of the model."""
        block = self.block_around(name)
        return self.twin_of[block] + name[len(block) :] if block else name


def _add_sizes_of_part(pairs: SizePairs, small: nn.Module, large: nn.Module) -> None:
    """Add the shapes of parameters and the integer attributes of two modules of the same structure."""
    for key, tensor in large._parameters.items():
        small_tensor = small._parameters[key]
        if tensor is not None and small_tensor is not None:
            pairs.add("parameters", small_tensor.shape, tensor.shape)
    for key, value in vars(large).items():
        small_value = vars(small).get(key)
        if type(value) is int and type(small_value) is int and not _is_place(key):
            pairs.add("attributes", [small_value], [value])


def _refuse(subject: str, model_value: Any, twin_value: Any) -> NoReturn:
    """Name the first difference of two values of nested tuples."""
    raise TwinMismatchError(f"{subject} differ from the twin's: {_first_difference(model_value, twin_value)}")


def _first_difference(a: Any, b: Any) -> str:
    if isinstance(a, tuple) and isinstance(b, tuple):
        if len(a) == len(b) == 2 and isinstance(a[0], str) and a[0] == b[0]:
            return f"{a[0]} = {_first_difference(a[1], b[1])}"
        for x, y in zip(a, b, strict=False):
            if x != y:
                return _first_difference(x, y)
        longer = a if len(a) > len(b) else b
        return f"{longer[min(len(a), len(b))]} is in one of them alone"
    return f"{a} in place of {b}"
