"""Which part of a tensor of the reference each rank should have: by rows of the batch, or by places in the whole."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from motet.verify.fold import folded_part, folded_rows
from motet.verify.record import Kind, Seen, bits_of

Site = tuple[Kind, str]
Given = Sequence[tuple[int, Seen]]
"""(rank, what it has)."""


class Part(NamedTuple):
    """What a rank has of a tensor, and what the reference has there."""

    rank: int | None
    """None: of all ranks together."""
    value: Tensor
    expected: Tensor
    seen: Seen | None = None
    bits: int = 0
    """That the reference's numbers have there."""


@dataclass(frozen=True)
class Whole:
    """A tensor of the reference."""

    site: Site
    value: Tensor
    rows: tuple[int, ...]
    """Of the batch."""
    seen: Seen


class UnfitError(Exception):
    """What ranks have does not make the tensor of the reference."""

    def __init__(self, rank: int | None, sentence: str) -> None:
        super().__init__(sentence)
        self.rank = rank


def parts_of(whole: Whole, given: Given) -> list[Part]:
    """What is to be compared with what."""
    first = given[0][1]
    if first.shape is not None:
        return list(_pieces(whole, given))
    if first.part < 0:
        for rank, each in given:
            if each.value.shape != whole.value.shape:
                shape, wanted = list(each.value.shape), list(whole.value.shape)
                raise UnfitError(rank, f"rank {rank} has shape {shape}, where one device has {wanted}")
        return [Part(rank, each.value, whole.value, each, whole.seen.bits) for rank, each in given]
    _refuse_rows(whole, given)
    if whole.site[0] == "loss":
        total = torch.stack([each.value.double() for _, each in given]).sum()
        return [Part(None, total, whole.value)]
    return list(_rows(whole, given))


def is_of_no_rows(whole: Whole, given: Given) -> bool:
    """The same shape whatever the rows: a table, or a mean over them."""
    return whole.site[0] != "loss" and any(
        each.part >= 0 and each.value.shape == whole.value.shape and len(each.rows) != len(whole.rows)
        for _, each in given
    )


def _refuse_rows(whole: Whole, given: Given) -> None:
    """Each row of the batch belongs to one micro-batch of one rank."""
    readers: dict[int, list[int]] = {row: [] for row in whole.rows}
    for rank, each in given:
        for row in each.rows:
            if row not in readers:
                raise UnfitError(rank, f"rank {rank} computes row {row}, which the batch has not")
            readers[row].append(rank)
    kind = whole.site[0]
    nobody = [row for row, ranks in readers.items() if not ranks]
    several = {row: ranks for row, ranks in readers.items() if len(ranks) > 1}
    what = {"activation gradient": "has a gradient of it for", "random mask": "draws it for"}.get(kind, "computes")
    said = [f"no rank {what} row{'s' * (len(nobody) > 1)} {listed(nobody)} of the batch"] if nobody else []
    for row, ranks in list(several.items())[:1]:
        who = sorted(set(ranks))
        said.append(f"row {row} is computed {len(ranks)} times, by rank{'s' * (len(who) > 1)} {listed(who)}")
    if said:
        raise UnfitError(next((ranks[-1] for ranks in several.values()), None), "; ".join(said))


def listed(numbers: Sequence[int]) -> str:
    return " and ".join(filter(None, [", ".join(map(str, numbers[:-1])), str(numbers[-1])]))


def _rows(whole: Whole, given: Given) -> Iterator[Part]:
    rows, expected = len(whole.rows), whole.value
    if not any(tensor.numel() for tensor in (expected, *(each.value for _, each in given))):
        return  # all are empty
    if is_of_no_rows(whole, given):
        yield from (Part(rank, each.value, expected, each, whole.seen.bits) for rank, each in given)
        return
    places = {row: place for place, row in enumerate(whole.rows)}
    for rank, each in given:
        if each.rows == whole.rows and each.value.shape == expected.shape:
            yield Part(rank, each.value, expected, each, whole.seen.bits)
            continue
        mine = [places[row] for row in each.rows]
        if expected.shape[:1] == (rows,) and (once := _for_all(whole, each, expected[mine])) is not None:
            yield Part(rank, *once, each)
            continue
        found = [
            (by_row(each.value, dim, inner, len(each.rows)), by_row(expected, dim, inner, rows))
            for dim, inner in _dims(expected, each, rows)
        ]
        if not found:
            shapes = f"shape {list(each.value.shape)} for {len(each.rows)} rows"
            raise UnfitError(rank, f"rank {rank} has {shapes}, where one device has {list(expected.shape)} for {rows}")
        nearest = min(found, key=lambda pair: _off(pair[0], pair[1][mine]))
        bits = whole.seen.bits if each.folded else bits_of(nearest[1][mine])
        yield Part(rank, nearest[0], nearest[1][mine], each, bits)


def _for_all(whole: Whole, each: Seen, expected: Tensor) -> tuple[Tensor, Tensor] | None:
    """What a micro-batch has once for all of its rows, as positions are if each row is one document."""
    if each.folded or not each.value.ndim:
        return None
    value = folded_rows(each.value[None])
    is_folded = value.shape[1:] != each.value.shape
    if value.shape[1:] != expected.shape[1:] or is_folded != whole.seen.folded:
        return None
    if whole.site[0] == "activation gradient":
        return value, expected.sum(0, keepdim=True)
    return value.expand_as(expected), expected


def _dims(expected: Tensor, each: Seen, rows: int) -> Iterator[tuple[int, bool]]:
    """(dim that has the rows, whether they are its inner index there)."""
    shape, whole = each.value.shape, expected.shape
    if len(shape) != len(whole):
        return
    for dim in range(len(whole)):
        others = [shape[i] == whole[i] for i in range(len(whole)) if i != dim]
        if all(others) and whole[dim] % rows == 0 and shape[dim] * rows == whole[dim] * len(each.rows):
            yield dim, False
            if whole[dim] != rows:
                yield dim, True


def by_row(tensor: Tensor, dim: int, inner: bool, rows: int) -> Tensor:
    """[rows, numbers of each]."""
    first = tensor.movedim(dim, 0)
    if inner:
        return first.reshape(-1, rows, *first.shape[1:]).transpose(0, 1).reshape(rows, -1)
    return first.reshape(rows, -1)


def _off(value: Tensor, expected: Tensor) -> float:
    return float(torch.linalg.vector_norm(value.double() - expected.double()).nan_to_num(torch.inf))


def _pieces(whole: Whole, given: Given) -> Iterator[Part]:
    flat = whole.value.reshape(-1)
    missing = torch.ones(flat.numel(), dtype=torch.bool)
    for rank, each in given:
        if each.shape != tuple(whole.value.shape):
            shape = list(each.shape or ())
            raise UnfitError(rank, f"rank {rank} has one of shape {shape}, not {list(whole.value.shape)}")
        stop = each.start + each.numel
        if stop > flat.numel():
            raise UnfitError(rank, f"rank {rank} has elements {each.start} to {stop - 1} of its {flat.numel()}")
        missing[each.start : stop] = False
        own = flat[each.start : stop]
        yield Part(rank, each.value, folded_part(own, each.start), each, bits_of(own))
    if missing.any():
        first = int(missing.nonzero()[0])
        raise UnfitError(None, f"no rank has {int(missing.sum())} of its {flat.numel()} elements, the first is {first}")
