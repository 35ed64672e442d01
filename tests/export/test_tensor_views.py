"""Views of a tensor are found as boxes of it, and read from a checkpoint in their own order."""

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from export.stored_models import OWN, job_of, store
from motet.checkpoint.reader import open_checkpoint
from motet.export import stored_parameters
from motet.export.stored_parameters import StoredParameters
from motet.export.tensor_views import find_box, read_view

VIEWS: dict[str, Callable[[Tensor], Tensor]] = {
    "the tensor": lambda t: t,
    "rows": lambda t: t[2:5],
    "one row": lambda t: t[3],
    "a half": lambda t: t.chunk(2, 1)[1],
    "a half of a row": lambda t: t[4].chunk(2, 0)[1],
    "inner dimensions exchanged": lambda t: t.transpose(1, 2),
    "outer dimensions exchanged": lambda t: t.transpose(0, 2),
    "a column": lambda t: t[:, 5],
    "a part in each dimension, turned": lambda t: t[1:4, 2:7, 3:5].permute(2, 0, 1),
    "with dimensions of one": lambda t: t[:, :1].unsqueeze(0),
    "an element": lambda t: t[1, 2, 3],
}


@pytest.mark.parametrize("view", VIEWS)
@pytest.mark.parametrize("piece_bytes", [1, 500, 1 << 20])
def test_views_are_read(view: str, piece_bytes: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    module = nn.Module()
    module.experts = nn.Parameter(torch.randn(6, 8, 7))
    expected = VIEWS[view](module.experts.detach())
    box = find_box(VIEWS[view](torch.empty(6, 8, 7, device="meta")), torch.empty(6, 8, 7, device="meta"))
    assert box is not None
    monkeypatch.setattr(stored_parameters, "PIECE_BYTES", piece_bytes)
    with open_checkpoint(store(job_of(OWN, tmp_path), module, tmp_path / "run")) as checkpoint:
        pieces = list(read_view(StoredParameters(checkpoint), "experts", box))
    assert torch.equal(torch.cat([piece.flatten() for piece in pieces]).view(expected.shape), expected)


NO_BOXES: dict[str, Callable[[Tensor], Tensor]] = {
    "every second row": lambda t: t[::2],
    "joined dimensions": lambda t: t.flatten(1),
    "a diagonal": lambda t: t.diagonal(),
}


@pytest.mark.parametrize("view", NO_BOXES)
def test_other_views_are_no_boxes(view: str) -> None:
    tensor = torch.empty(6, 8, 7, device="meta")
    assert find_box(NO_BOXES[view](tensor), tensor) is None
