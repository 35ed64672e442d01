"""Uses of parameters are recorded in the first forward; modules wait for what they use, and for nothing else."""

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from motet.parallel.data_parallel.bucketed_zero import ModuleParameterWaiter


class Scores(nn.Module):
    def __init__(self, table: nn.Embedding) -> None:
        super().__init__()
        self.owner = [table]  # not a child
        self.parts = nn.ParameterList([nn.Parameter(torch.ones(3)) for _ in range(2)])

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(x, self.owner[0].weight) + torch.cat(list(self.parts)).sum()


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(5, 3)
        self.used, self.never, self.raw = (nn.Linear(3, 3) for _ in range(3))
        self.scores = Scores(self.table)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.used(self.table(tokens))
        x = F.linear(x, weight=self.raw.weight)
        scored: Tensor = self.scores(x)
        return scored


def test_modules_wait_for_what_they_use() -> None:
    model = Model()
    names = [name for name, _ in model.named_parameters()]
    numbers = {parameter: number for number, parameter in enumerate(model.parameters())}
    asked: list[int] = []
    uses = ModuleParameterWaiter(model, numbers, asked.append)
    uses.begin_step()
    model(torch.tensor([1, 2]))
    assert not asked
    uses.finish_recording()
    unseen = {"never.weight", "never.bias", "raw.bias"}
    order = [names[number] for number in uses.first_use_order]
    assert set(order[:3]) == unseen
    assert order[3:] == [
        "table.weight", "used.weight", "used.bias", "raw.weight", "scores.parts.0", "scores.parts.1",
    ]  # fmt: skip
    model(torch.tensor([1]))
    said = [names[number] for number in dict.fromkeys(asked)]
    assert set(said[:3]) == unseen
    assert said[3:] == ["raw.weight", "table.weight", "used.weight", "used.bias", "scores.parts.0", "scores.parts.1"]
    asked.clear()
    model.scores(torch.ones(1, 3))
    assert {names[number] for number in asked} == unseen | {"table.weight", "scores.parts.0", "scores.parts.1"}
    asked.clear()
    model.raw(torch.ones(3))  # it was not called while it was watched
    assert names.index("raw.weight") in asked


class Parts(nn.Module):
    """Its loss calls parts of it and reads parameters between them, but never calls the whole."""

    def __init__(self) -> None:
        super().__init__()
        self.scale, self.shift, self.bias = (nn.Parameter(torch.ones(3)) for _ in range(3))
        self.one, self.other = nn.Linear(3, 3), nn.Linear(3, 3)

    def loss(self, x: Tensor) -> Tensor:
        x = self.one(x * self.scale) + self.shift[0]
        return (self.other(x) + self.bias).sum()


def test_what_is_read_between_modules_is_there() -> None:
    """Each parameter is of no use until it was waited for."""
    model = Parts()
    values = [p.detach().clone() for p in model.parameters()]
    parameters = list(model.parameters())

    @torch.no_grad()
    def arrive(number: int) -> None:
        parameters[number].copy_(values[number])

    for together in (1, 2, 3):  # so many parameters travel together
        buckets = {p: n // together for n, p in enumerate(parameters)}
        uses = ModuleParameterWaiter(model, buckets, lambda n, k=together: [
            arrive(i) for i in range(len(parameters)) if i // k == n
        ])  # fmt: skip
        uses.begin_step()
        wanted = model.loss(torch.ones(2, 3)).item()
        uses.finish_recording()
        for _ in range(2):
            with torch.no_grad():
                for parameter in parameters:
                    parameter.fill_(torch.nan)
            uses.begin_step()
            assert model.loss(torch.ones(2, 3)).item() == wanted
        assert torch._C._len_torch_function_stack() == 0


def test_a_forward_that_fails_leaves_no_watch_behind() -> None:
    model = Model()
    uses = ModuleParameterWaiter(model, dict.fromkeys(model.parameters(), 0), lambda number: None)
    uses.begin_step()
    with pytest.raises(RuntimeError):
        model(torch.ones(2))  # no tokens
    uses.begin_step()
    model(torch.tensor([1]))
    uses.finish_recording()
    assert torch._C._len_torch_function_stack() == 0


def test_another_mode_that_was_entered_later_is_left_first() -> None:
    model = Model()
    uses = ModuleParameterWaiter(model, dict.fromkeys(model.parameters(), 0), lambda number: None)
    uses.begin_step()
    with torch.device("cpu"):
        model(torch.tensor([1]))
        uses.finish_recording()
        assert torch._C._len_torch_function_stack() == 2
    uses.begin_step()
    assert torch._C._len_torch_function_stack() == 0
