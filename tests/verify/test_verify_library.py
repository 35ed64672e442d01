"""`motet.verify` on modules and parallel code of the caller's own. The guide to silent bugs is run as it stands."""

import contextlib
import io
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import motet
from motet.core.errors import InputError

PAGE = Path(__file__).parents[2] / "docs" / "guide" / "silent-bugs.md"


def test_the_guide_to_silent_bugs_is_true() -> None:
    blocks = re.findall(r"```(python|text)\n(.*?)```", PAGE.read_text(), re.DOTALL)
    names: dict[str, Any] = {}
    printed = io.StringIO()
    for kind, text in blocks:
        if kind == "python":
            with contextlib.redirect_stdout(printed):
                exec(compile(text, str(PAGE), "exec"), names)
            continue
        said = re.sub(r" \(\d+\.\d s\)", "", printed.getvalue())
        assert said == text
        printed = io.StringIO()
    assert len(blocks) == 5


def model() -> nn.Module:
    return nn.Sequential(nn.Linear(6, 8), nn.Dropout(0.2), nn.Tanh(), nn.Linear(8, 3))


def batch(step: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(step)
    return torch.randn(12, 6, generator=generator), torch.randn(12, 3, generator=generator)


def loss(module: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
    return nn.functional.mse_loss(module(batch[0]), batch[1])


def test_layouts_of_a_module() -> None:
    report = motet.verify(model, ["zero=1", "dp=3 zero=2 microbatches=2"], batch, loss=loss)
    assert report.ok, report
    assert [verdict.layout for verdict in report.verdicts] == ["zero=1", "dp=3 zero=2 microbatches=2"]
    assert all(0 < verdict.worst_relative < 1e-13 for verdict in report.verdicts)
    assert report.as_json()["layouts"][0]["ok"] is True


class Batchy(nn.Module):
    """Its rows depend on each other."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(6, 3)

    def forward(self, x: Tensor) -> Tensor:
        found: Tensor = self.inner(x - x.mean(0))
        return found


def test_rows_that_depend_on_each_other_are_told() -> None:
    report = motet.verify(Batchy, ["zero=1"], batch, loss=loss)
    assert not report.ok
    assert report.verdicts[0].first_difference == "activation inner, step 1"
    assert "its rows depend on the other rows" in (report.verdicts[0].cause or "")


@pytest.mark.parametrize(
    ("layouts", "batches", "said"),
    [
        (["dp=5"], batch, "data.batch_sequences = 12 cannot be cut evenly over 5 ranks"),
        (["dp=2 data=parameter_server"], batch, "servers are processes of a job"),
        (["zero=1"], lambda step: (torch.zeros(3, 2), torch.zeros(4)), "have {'0': 3, '1': 4} rows"),
        ([lambda module: lambda rows: {"grads": torch.zeros(1)}], batch, "your step gives 'grads'"),
    ],
)
def test_what_cannot_be_verified(layouts: Any, batches: Any, said: str) -> None:
    with pytest.raises(InputError, match=re.escape(said)):
        motet.verify(model, layouts, batches, loss=loss)


def test_a_loss_that_is_no_number() -> None:
    with pytest.raises(InputError, match="the loss is no single number"):
        motet.verify(model, ["zero=1"], lambda step: batch(step)[0])
