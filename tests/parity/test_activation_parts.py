"""Parts of activations: what each rank has by the entries of a ModelSharding, written down by hand."""

from math import prod

import pytest
import torch
from torch import Tensor

from motet.parallel.model_sharding import ActivationSplit, BoundaryComm, DimensionSplit, ModelSharding
from motet.parallel.parallel_dims import ParallelDims
from motet.parity.record.activation_parts import ActivationParts, TokenParts, cut_part, put_part
from motet.parity.record.tensor_recorder import MAX_ROW_NUMEL, TensorRecorder

EVEN, FUSED = DimensionSplit(-1, "tp"), DimensionSplit(2, "tp", parts=(8, 4, 4), unit=2)
SHARED, UNEVEN = DimensionSplit(2, "tp", parts=(8, 2), unit=2), DimensionSplit(2, "tp", parts=(7,))
TOKENS = DimensionSplit(1, "tp")
COMMS = (BoundaryComm("b.attn.q", "input", 0, "copy", "tp"), BoundaryComm("b.attn.out", "output", 0, "sum", "tp"))


def parts(*activations: ActivationSplit, tp: int = 2) -> ActivationParts:
    return ActivationParts(ModelSharding({}, COMMS, activations=activations), ParallelDims((("dp", 2), ("tp", tp))))


@pytest.mark.parametrize(
    ("split", "length", "columns"),
    [
        (EVEN, 6, [[0, 1, 2], [3, 4, 5]]),
        (FUSED, 16, [[0, 1, 2, 3, 8, 9, 12, 13], [4, 5, 6, 7, 10, 11, 14, 15]]),
        (SHARED, 10, [[0, 1, 2, 3, 8, 9], [4, 5, 6, 7, 8, 9]]),
        (UNEVEN, 7, [[0, 1, 2, 3], [4, 5, 6]]),
    ],
)
def test_each_rank_has_its_columns(split: DimensionSplit, length: int, columns: list[list[int]]) -> None:
    lies = parts(ActivationSplit("b.attn.q", "output", (split,)))
    whole = torch.arange(3.0 * 4 * length).view(3, 4, length)
    total = torch.zeros_like(whole)
    for rank in range(4):
        spec = lies.spec("b.attn.q", rank, (3, 4, length), rows=3)
        assert spec is not None
        own = cut_part(whole, spec)
        assert torch.equal(own, whole[..., columns[rank % 2]])
        local = torch.nn.functional.pad(own, (0, max(map(len, columns)) - own.shape[2]), value=7.0)
        assert lies.local_spec("b.attn.q", rank, tuple(local.shape), rows=3) == spec
        total += put_part(local, spec) / lies.holders("b.attn.q", (3, 4, length))
    torch.testing.assert_close(total, 2 * whole)  # Both data-parallel ranks
    assert lies.is_shared("b.attn.q") == (split is SHARED)


def splits_of(name: str, *activations: ActivationSplit) -> tuple[DimensionSplit, ...] | None:
    return parts(*activations).splits(name)


def test_entries_hold_for_modules_inside_and_unknown_ones_in_a_region_are_known_to_be_unknown() -> None:
    entries = ActivationSplit("b", "input", (TOKENS,)), ActivationSplit("b.attn[1]", "output", (EVEN,))
    assert splits_of("b.norm", *entries) == splits_of("b.attn (call 2)", *entries) == (TOKENS,)
    assert splits_of("b.attn[1]", *entries) == (EVEN,) and splits_of("b.attn[0]", *entries) == (TOKENS,)
    assert splits_of("b.attn.core", *entries) is None and splits_of("head", *entries) == ()
    assert splits_of("b.attn[2]", *entries) is None and splits_of("b[1]", *entries) is None
    entry = ActivationSplit("[logits]", "output", (UNEVEN,))
    assert splits_of("whole model[logits]", entry) == (UNEVEN,) and splits_of("model[logits]", entry) == ()


@pytest.mark.parametrize(("cp", "places"), [(1, [[0, 1, 2, 3], [4, 5, 6, 7]]), (2, [[0, 1], [6, 7], [2, 3], [4, 5]])])
def test_tokens_of_several_rows_in_one_dimension(cp: int, places: list[list[int]]) -> None:
    """The input of experts has the tokens of all rows one after another, and a rank has some of each row. With `cp`
    the first of two ranks has the tokens 0, 1, 6, 7 of a row, of which tensor parallelism gives it 0 and 1."""
    dims = ParallelDims((("dp", 1), ("cp", cp), ("tp", 2)))
    tokens = TokenParts(dims, "head-tail", 8) if cp > 1 else None
    split = ModelSharding({}, COMMS, activations=(ActivationSplit("b", "input", (TOKENS,)),))
    lies, whole = ActivationParts(split, dims, tokens=tokens), torch.arange(24.0).view(24, 1).expand(24, 5)
    for rank, here in enumerate(places):
        own = whole[[8 * row + place for row in range(3) for place in here]]
        spec = lies.local_spec("b.experts", rank, tuple(own.shape), rows=3)
        assert spec is not None and torch.equal(cut_part(whole, spec), own)


def test_a_split_of_size_one_splits_nothing() -> None:
    lies = parts(ActivationSplit("b.attn.q", "output", (EVEN,)), tp=1)
    spec, shape = lies.spec("b.attn.q", 1, (3, 4, 6), rows=3), (3, 4, 6)
    assert spec is not None and spec.local_shape == shape and spec.numel == prod(shape)


def test_the_part_of_another_shape_is_not_known() -> None:
    lies = parts(ActivationSplit("b.attn.q", "output", (FUSED,)))
    assert lies.local_spec("b.attn.q", 0, (3, 4, 16), rows=3) is None
    assert lies.local_spec("b.attn.q", 0, (3,), rows=3) is None


def test_sketches_of_parts_add_up() -> None:
    lies, shape = parts(ActivationSplit("b.attn.q", "output", (SHARED,))), (2, MAX_ROW_NUMEL // 8, 10)
    whole: Tensor = torch.randn(shape, dtype=torch.float64)

    def sketched(value: Tensor, rank: int | None) -> Tensor:
        recorder = TensorRecorder(activations=lies if rank is not None else None, rank=rank or 0)
        recorder.add("activation", "b.attn.q", value)
        assert recorder.records[0].is_sketched
        return recorder.records[0].value

    specs = [lies.spec("b.attn.q", rank, shape, rows=2) for rank in (0, 1)]
    own = [cut_part(whole, spec) for spec in specs if spec]
    torch.testing.assert_close(sketched(own[0], 0) + sketched(own[1], 1), sketched(whole, None))
