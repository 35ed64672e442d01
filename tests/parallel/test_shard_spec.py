"""The shard of a rank as boxes of the whole: every element in local order, and padding in no box."""

from itertools import product
from math import prod

import pytest
import torch

from motet.parallel.shard_spec import ShardSpec

SPECS = {
    "column": ShardSpec((6, 4), (((2, 4),), ((0, 4),))),
    "row": ShardSpec((6, 4), (((0, 6),), ((1, 3),))),
    "fused query, key and value": ShardSpec((12, 3), (((0, 2), (6, 7), (10, 12)), ((0, 3),))),
    "fused along the last dimension": ShardSpec((2, 3, 8), (((0, 2),), ((1, 3),), ((0, 2), (4, 6)))),
    "vocabulary with padding": ShardSpec((5, 3), (((4, 5),), ((0, 3),)), (1, 0)),
    "padding of inner dimensions": ShardSpec((2, 3, 2), (((0, 1), (1, 2)), ((1, 3),), ((0, 2),)), (1, 2, 1)),
    "only padding": ShardSpec((5, 3), (((5, 5),), ((0, 3),)), (2, 0)),
    "a stack of experts over two dimensions": ShardSpec((4, 6, 2), (((2, 4),), ((3, 6),), ((0, 2),))),
}


def local_values(spec: ShardSpec) -> torch.Tensor:
    """The elements that a rank holds, by the definition: the product of the spans, -1 where it holds padding."""
    wanted = torch.full(spec.local_shape, -1)
    indices = [[i for first, stop in spans for i in range(first, stop)] for spans in spec.spans]
    numbers = torch.arange(prod(spec.shape)).view(spec.shape)
    for place in product(*(range(len(index)) for index in indices)):
        wanted[place] = numbers[tuple(index[i] for index, i in zip(indices, place, strict=True))]
    return wanted.flatten()


@pytest.mark.parametrize("spec", SPECS.values(), ids=SPECS)
def test_boxes_hold_the_elements_of_every_run(spec: ShardSpec) -> None:
    numbers, wanted = torch.arange(prod(spec.shape)).view(spec.shape), local_values(spec)
    assert spec.numel == (wanted >= 0).sum()
    for start in range(len(wanted) + 1):
        for stop in range(start, len(wanted) + 1):
            held = torch.full_like(wanted, -1)
            for (offsets, lengths), local in spec.boxes(start, stop):
                assert start <= local.start < local.stop <= stop
                box = numbers[tuple(slice(o, o + n) for o, n in zip(offsets, lengths, strict=True))]
                assert (held[local] == -1).all() and box.shape == lengths
                held[local] = box.flatten()
            assert torch.equal(held[start:stop], wanted[start:stop])


def test_rows_without_padding_are_one_box() -> None:
    """A split along one dimension costs no more boxes than the whole does."""
    assert len(list(SPECS["column"].boxes(0, 8))) == len(list(SPECS["row"].boxes(0, 12))) == 1
    assert len(list(SPECS["fused query, key and value"].boxes(0, 15))) == 3


def test_specs_overlap_where_they_share_an_element() -> None:
    for a, b in product(SPECS.values(), repeat=2):
        if a.shape == b.shape:
            shared = set(local_values(a).tolist()) & set(local_values(b).tolist()) - {-1}
            assert a.overlaps(b) == bool(shared)


@pytest.mark.parametrize("shape", [(), (7,), (3, 4), (2, 3, 4), (1, 5, 1), (2, 2, 2, 2), (3, 1, 2)])
def test_boxes_hold_the_elements_in_order(shape: tuple[int, ...]) -> None:
    whole = torch.arange(prod(shape)).view(shape)
    for start in range(whole.numel() + 1):
        for stop in range(start, whole.numel() + 1):
            found = [box for box, _ in ShardSpec.full(shape).boxes(start, stop)]
            cut = [whole[tuple(slice(o, o + n) for o, n in zip(*box, strict=True))].flatten() for box in found]
            assert torch.cat([*cut, whole.flatten()[:0]]).tolist() == list(range(start, stop))
            assert len(found) <= max(1, 2 * len(shape) - 1)
