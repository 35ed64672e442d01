"""Which implementation runs, and the plain definitions in one graph."""

import json
import math
import subprocess
import sys
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from gpu_checks.kernel_patches import kernels_forced
from gpu_checks.measured_kernels import MeasuredRow, write_measured_rows
from torch import Tensor

from motet.models.arch.layers import apply_rotary, gated_activation, rms_norm
from motet.models.kernels import choice
from motet.models.kernels.choice import chosen, read_measured_rows
from motet.models.settings import ActivationName


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The file of measured rows in an empty cache folder."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    return tmp_path / "motet/kernels.json"


def one_graph(function: Callable[..., Tensor], *inputs: Tensor) -> None:
    """Compile a function as one graph; compare its value and gradients with the eager ones."""
    graphs = []

    def keep_graph(graph: torch.fx.GraphModule, _: list[Tensor]) -> torch.fx.GraphModule:
        graphs.append(graph)
        return graph

    compiled = torch.compile(function, fullgraph=True, backend=keep_graph)
    leaves = [x for x in inputs if x.requires_grad]
    eager, traced = function(*inputs), compiled(*inputs)
    grad = torch.randn_like(eager)
    for a, b in zip(torch.autograd.grad(eager, leaves, grad), torch.autograd.grad(traced, leaves, grad), strict=True):
        assert (a - b).abs().max() < 1e-14
    assert (eager - traced).abs().max() < 1e-14 and len(graphs) == 1
    assert not any(
        "autograd_function" in str(node.target) or "complex" in str(node.target) for node in graphs[0].graph.nodes
    )


def doubles(*shape: int) -> Tensor:
    return torch.randn(*shape, dtype=torch.float64, requires_grad=True)


def test_a_compiled_norm_is_its_plain_definition() -> None:
    one_graph(lambda x, weight: rms_norm(x, weight, 1e-5), doubles(3, 4, 10), doubles(10))


@pytest.mark.parametrize("name", ["silu", "gelu", "gelu_tanh", "relu", "relu_squared"])
def test_a_compiled_gate_is_its_plain_definition(name: ActivationName) -> None:
    one_graph(lambda x: gated_activation(x, name), doubles(3, 4, 10))


def test_a_compiled_rotation_is_its_plain_definition() -> None:
    one_graph(lambda x, turns: apply_rotary(x, turns), doubles(3, 4, 2, 10), doubles(4, 1, 4, 2).detach())


def test_a_cpu_never_chooses_triton() -> None:
    rows = [row for row in choice.ROWS if row.device in ("cpu", "any")]
    assert rows and all(row.implementation != "triton" for row in rows)
    assert chosen("rms_norm", torch.zeros(2**20)) == "cpu" == chosen("rms_norm", torch.zeros(1, device="meta"))
    with kernels_forced("plain"):
        assert chosen("rms_norm", torch.zeros(1)) == "plain"
    assert chosen("rms_norm", torch.zeros(1)) == "cpu"


def test_each_kernel_has_a_row_of_any_size_for_each_device() -> None:
    for kernel in choice.KernelName.__args__:
        for device in ("cpu", "cuda"):
            rows = choice._matching_rows(kernel, device, "float64", name="")
            assert any(least == 0 and implementation != "triton" for least, implementation in rows), (kernel, device)


def test_measured_rows_come_before_assumed_ones(cache: Path) -> None:
    rows = [
        MeasuredRow(kernel="rms_norm", dtype="bfloat16", least_elements=least, implementation=implementation)
        for least, implementation in ((0, "torch"), (4096, "plain"))
    ]
    assert read_measured_rows() == {}
    assert write_measured_rows("A", rows) == cache and write_measured_rows("B", []) == cache
    assert [(row.least_elements, row.implementation) for row in read_measured_rows()["A"]] == [
        (4096, "plain"),
        (0, "torch"),
    ]
    choice._matching_rows.cache_clear()
    low, high = (
        [choice._matching_rows("rms_norm", "cuda", dtype, name=n) for n in "AB"] for dtype in ("bfloat16", "float16")
    )
    assert low[0] == [(4096, "plain"), (0, "torch"), *low[1]] and high[0] == high[1] != low[0]


def test_the_rows_of_a_measurement_are_those_that_runs_ask_for(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The master of adamw is in float32, other tensors are in bfloat16; no size is left to rows that are assumed."""
    from gpu_checks import kernel_rows

    few, many = kernel_rows.TOKENS["cuda"]
    values: dict[str, dict[int, Any]] = {
        "seconds": {few: {"torch": 1.0, "triton": 2.0}, many: {"torch": 2.0, "triton": 1.0}},
        "elements": {few: 5000, many: 10**6},
        "error": {few: 0.5, many: 0.5},
    }

    class Measured:
        def __init__(self) -> None:
            self.facts = {"device": "A"}

        def value(self, row: str, key: str) -> Any:
            return values[key][few if f" {few} tokens" in row else many]

    measured: Any = Measured()
    kernel_rows._table("cuda", measured)
    monkeypatch.setattr(choice, "has_triton", lambda: True)
    for kernel in choice.KernelName.__args__:
        dtype = "float32" if kernel == "adamw" else "bfloat16"
        rows = choice._matching_rows.__wrapped__(kernel, "cuda", dtype, name="A")
        assert rows[:2] == [(10**6, "triton"), (0, kernel_rows.WITHOUT_TRITON[kernel])], kernel


def test_a_kernel_that_fails_costs_no_other_its_rows(cache: Path) -> None:
    """One that is wrong is never chosen, however fast it is; one that is not measured keeps the rows of the table."""
    from gpu_checks import kernel_rows
    from gpu_checks.rows import LeftOutError

    failed, errors = {"rotary"}, {"dropout": 1.1, "adamw": math.nan}

    class Measured:
        facts = {"device": "A"}  # noqa: RUF012  (nothing changes it)

        def value(self, row: str, key: str) -> Any:
            kernel = row.removeprefix("kernel ").partition(",")[0]
            values = {"seconds": {"torch": 2.0, "triton": 1.0}, "elements": 9, "error": errors.get(kernel, 1.0)}
            return None if kernel in failed else values[key]

    measured: Any = Measured()
    assert kernel_rows._table("cuda", measured).result.endswith("; rotary not measured at both sizes")
    rows = {row.kernel: row.implementation for row in read_measured_rows()["A"]}
    expected = dict.fromkeys(choice.KernelName.__args__, "triton") | {"dropout": "plain", "adamw": "torch"}
    assert rows == {kernel: way for kernel, way in expected.items() if kernel not in failed}
    failed.update(kernel_rows.WITHOUT_TRITON)
    with pytest.raises(LeftOutError, match="no kernel"):
        kernel_rows._table("cuda", measured)


@pytest.mark.parametrize("text", ["", "[]", '{"A": [{"kernel": "no"}]}', json.dumps({"more": 1})])
def test_a_damaged_file_counts_as_empty(cache: Path, text: str) -> None:
    cache.parent.mkdir()
    cache.write_text(text)
    assert read_measured_rows() == {}
    write_measured_rows("A", [MeasuredRow(kernel="rotary", dtype="float32", least_elements=0, implementation="torch")])
    assert len(read_measured_rows()["A"]) == 1


def test_without_triton_a_gpu_runs_operators_of_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(choice, "has_triton", lambda: True)
    rows = [choice._matching_rows.__wrapped__("rms_norm", "cuda", "bfloat16", name="")]
    monkeypatch.setattr(choice, "has_triton", lambda: False)
    rows.append(choice._matching_rows.__wrapped__("rms_norm", "cuda", "bfloat16", name=""))
    assert [way for _, way in rows[1]] == ["torch"] and rows[0][0][1] == "triton"


@pytest.mark.parametrize(
    ("variable", "programs", "expected"),
    [
        (None, ["gcc"], True),
        (None, ["clang"], True),
        (None, ["cc"], False),
        (None, [], False),
        ("icx", ["icx"], True),
        ("icx", ["gcc"], False),  # Triton calls the one that is named
    ],
)
def test_triton_needs_a_compiler_of_c(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, variable: str | None, programs: list[str], expected: bool
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setenv("CC", variable or "")
    if variable is None:
        monkeypatch.delenv("CC")
    for program in programs:
        (tmp_path / program).touch(mode=0o755)
    monkeypatch.setattr(choice, "find_spec", lambda name: object())
    assert choice.has_triton.__wrapped__() is expected
    monkeypatch.setattr(choice, "find_spec", lambda name: None)
    assert not choice.has_triton.__wrapped__()


@pytest.mark.parametrize("compiles", [True, False])
def test_triton_needs_a_driver_that_compiles_on_a_gpu(monkeypatch: pytest.MonkeyPatch, compiles: bool) -> None:
    class Driver:
        @property
        def utils(self) -> object:
            if not compiles:
                raise subprocess.CalledProcessError(1, ["gcc"])
            return self

    runtime = SimpleNamespace(driver=SimpleNamespace(active=Driver()))
    for name, value in (("find_spec", lambda _: runtime), ("import_module", lambda _: runtime), ("shutil", runtime)):
        monkeypatch.setattr(choice, name, value)
    runtime.which = lambda name: name
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    with nullcontext() if compiles else pytest.warns(match="its driver cannot be made"):
        assert choice.has_triton.__wrapped__() is compiles


def test_a_model_trains_where_triton_cannot_be_imported() -> None:
    code = """import sys
sys.modules["triton"] = None
import torch
from motet.models.arch.layers import RMSNorm, add_norm
x = torch.ones(2, 4, requires_grad=True)
add_norm(x, x, RMSNorm(4, 1e-5))[1].sum().backward()
"""
    subprocess.run([sys.executable, "-c", code], check=True)
