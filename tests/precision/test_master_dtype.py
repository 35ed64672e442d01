"""Masters in another dtype than the recipe's: what is computed stays in the dtype of the recipe, in each layout."""

from pathlib import Path
from typing import Any

import pytest
import torch

from motet.core.errors import InputError
from motet.parallel.process.process_group import RankGroup
from motet.precision.recipe import PrecisionSettings
from motet.train.build import build_components
from motet.train.job import load_job
from ranks import Ranks
from train.runs import small_job


def trained(
    group: RankGroup, folder: Path, recipe: str, settings: list[str], model: str = "decoder"
) -> tuple[list[float], list[str], Any]:
    """The losses of a job, the dtypes of masters and moments, and those of the parameters while it computes."""
    job = small_job(folder, f"precision.recipe={recipe}", *settings, model=model)
    parts, computed = build_components(job, group, folder), set[torch.dtype]()
    for module in parts.model.module.modules():
        if isinstance(module, torch.nn.Linear):
            module.register_forward_pre_hook(lambda m, args: computed.update((m.weight.dtype, args[0].dtype)))
    stepper = parts.make_train_step(job)
    losses = [stepper.step(step, 0.003).loss for step in range(3)]
    optimizer = parts.engine.optimizer
    kept = [shard.values for kinds in optimizer.state_by_kind().values() for name, shard in kinds.items() if name]
    return losses, sorted({str(each.dtype) for each in kept}), {str(dtype) for dtype in computed}


@pytest.mark.parametrize("recipe", ["fp32", "bf16"])
@pytest.mark.parametrize("layout", ["layout.zero=0", "layout.zero=2", "layout.zero=3"])
def test_float64_masters_train_as_those_of_the_recipe(ranks: Ranks, tmp_path: Path, recipe: str, layout: str) -> None:
    (expected, dtypes, computed), *_ = ranks.run(1, trained, tmp_path, recipe, [])
    assert dtypes == ["torch.float32"]
    wide = [layout, "precision.master_dtype=float64"]
    for losses, wide_dtypes, wide_computed in ranks.run(2, trained, tmp_path, recipe, wide):
        assert wide_dtypes == ["torch.float64"] and wide_computed == computed
        assert losses == pytest.approx(expected, rel=1e-5 if recipe == "fp32" else 5e-3)


@pytest.mark.parametrize(("model", "layout"), [("llama", ""), ("decoder", "layout.tp=2"), ("bert", "layout.zero=2")])
def test_other_models_and_split_layers_compute_in_the_dtype_of_the_recipe(
    ranks: Ranks, tmp_path: Path, model: str, layout: str
) -> None:
    wide = ["precision.master_dtype=float64", *filter(None, [layout])]
    (expected, _, computed), *_ = ranks.run(1, trained, tmp_path, "fp32", [], model)
    for losses, dtypes, wide_computed in ranks.run(2, trained, tmp_path, "fp32", wide, model):
        assert dtypes == ["torch.float64"] and wide_computed == computed == {"torch.float32"}
        assert losses == pytest.approx(expected, rel=1e-5)


def test_moments_have_the_dtype_of_the_masters() -> None:
    resolved = PrecisionSettings(recipe="bf16", master_dtype="float64", reduce_dtype="bfloat16").resolved
    assert (resolved.compute, resolved.master, resolved.reduce) == ("bfloat16", "float64", "bfloat16")
    assert resolved.state == "float64" and resolved.moments_are_masters_dtype


def test_masters_of_16_bits_and_others_of_fp64_are_refused() -> None:
    with pytest.raises(InputError, match=r"precision\.master_dtype"):
        load_job("tiny", ["precision.recipe=bf16", "precision.master_dtype=bfloat16"])
    with pytest.raises(InputError, match=r"master_dtype = 'float32' has no effect with precision.recipe = 'fp64'"):
        load_job("tiny", ["precision.recipe=fp64", "precision.master_dtype=float32"])
