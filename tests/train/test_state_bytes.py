"""The bytes per parameter that `motet show precision` prints are those that an engine keeps."""

from typing import Any

import pytest
import torch
from torch import nn

import motet
from motet.cli.show.precision_output import _row, _rows
from motet.parallel.step_plan.memory import model_state_memory
from motet.precision.recipe import RECIPES, PrecisionSettings, parameter_state_bytes
from motet.train.engine import TrainingEngine
from motet.train.optimizer.optimizer_settings import OptimizerSettings
from motet.train.optimizer.sharded_optimizer import ShardedOptimizer

OPTIMIZERS: dict[str, dict[str, Any]] = {
    "AdamW": {"name": "adamw"},
    "SGD, momentum": {"name": "sgd", "momentum": 0.9},
    "SGD": {"name": "sgd"},
}
WIDTH = 256  # Elements of the largest block of 8-bit moments


def measured_bytes(engine: TrainingEngine) -> dict[str, float]:
    """Bytes for each parameter, counted by storage, so that what is a view of something else counts once."""
    sharded = engine.optimizer.sharded_parameters
    parameters = [parameter.data for parameter in engine.module.parameters()]
    moments = [t for state in engine.optimizer._optimizer.state.values() for t in state.values() if t.ndim]
    moments += stored_tensors(engine.optimizer)
    counted, sizes = set[int](), dict[str, float]()
    kinds = {"parameters": parameters, "gradients": sharded.local_gradients(), "masters": sharded.local_masters}
    for kind, tensors in (kinds | {"moments": moments}).items():
        storages = {t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in tensors}
        sizes[kind] = sum(size for key, size in storages.items() if key not in counted) / WIDTH**2
        counted |= storages.keys()
    return sizes


def stored_tensors(optimizer: ShardedOptimizer) -> list[torch.Tensor]:
    """The tensors of moments that have another format than that of the masters."""
    parts = optimizer._compact._moments.values() if optimizer._compact else ()
    stored = [vars(moment) for each in parts for moments in each for moment in moments.stored.values()]
    return [moment[name] for moment in stored for name in ("values", "codes", "scales") if name in moment]


# tf32 has the dtypes of fp32; a custom loop sets the precision of float32 products itself.
TRAINED = [row for row in _rows() if row["recipe"] != "tf32"]


# With masters of another dtype than that of the recipe, as a job can choose them.
WIDE = [
    _row(name, optimizer, PrecisionSettings.model_validate({"recipe": name, "master_dtype": "float64"}).resolved)
    for name in RECIPES
    if name not in ("fp64", "tf32")
    for optimizer in (OptimizerSettings(), OptimizerSettings(name="sgd"))
]


@pytest.mark.parametrize(
    "row", TRAINED + WIDE, ids=lambda row: f"{row['recipe']}-{row['master']}-{row['reduce']}-{row['optimizer']}"
)
def test_an_engine_keeps_the_bytes_that_are_printed(row: dict[str, Any]) -> None:
    usual = RECIPES[row["recipe"]]
    replaced = {"reduce": "reduce_dtype", "master": "master_dtype"}
    replaced |= {"state": "moment_dtype"} if row["state"] != row["master"] else {}
    changes = {key: row[kind] for kind, key in replaced.items() if row[kind] != getattr(usual, kind)}
    precision = {"recipe": row["recipe"], **changes}
    engine = motet.parallelize(
        nn.Linear(WIDTH, WIDTH, bias=False),
        loss=lambda module, x: (module(x).float().square().sum(), 1),
        precision=precision,
        optimizer=OPTIMIZERS[row["optimizer"]],
    )
    recipe = PrecisionSettings.model_validate(precision).resolved
    engine.step(torch.full((1, WIDTH), 0.01, dtype=getattr(torch, recipe.compute)))
    assert measured_bytes(engine) | {"total": row["bytes"]["total"]} == row["bytes"]
    moments = OptimizerSettings.model_validate(OPTIMIZERS[row["optimizer"]]).moments_per_parameter
    said = model_state_memory(engine.plan, recipe, moments_per_parameter=moments, rank=0)
    assert said.total == row["bytes"]["total"] * WIDTH**2


def test_known_totals() -> None:
    rows = list(_rows())
    totals = {
        (r["recipe"], r["reduce"], r["optimizer"]): r["bytes"]["total"] for r in rows if r["state"] == r["master"]
    }
    compact = {(r["recipe"], r["state"], r["optimizer"]): r["bytes"]["total"] for r in rows}
    assert compact["bf16", "bfloat16", "AdamW"] == 14 and compact["bf16", "8bit", "AdamW"] == 12 + 2 * 4 / 256
    assert totals["fp32", "float32", "AdamW"] == 16 and totals["bf16", "float32", "AdamW"] == 18
    assert totals["bf16", "bfloat16", "AdamW"] == 16 and totals["fp32", "float32", "SGD, momentum"] == 12
    assert {row["recipe"] for row in _rows()} == {*RECIPES} and RECIPES["tf32"] == RECIPES["fp32"]


def test_rows_of_stage_3_are_masters_with_gradients_of_their_dtype() -> None:
    kept = parameter_state_bytes(RECIPES["bf16"], 2, storage="rows")
    assert vars(kept) == {"parameters": 0, "gradients": 4, "masters": 4, "moments": 8} and kept.total == 16
    assert parameter_state_bytes(RECIPES["fp32"], 2, separate_masters=True).total == 20
