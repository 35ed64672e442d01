"""Ranks that build only what they hold of a model have the values of the complete model, bit for bit."""

import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch.distributed.tensor import DTensor

from motet.models.build import build_module, build_trainable_model
from motet.models.hf.hf_weights import find_weights
from motet.models.parameter_values import parameters_on_meta
from motet.models.settings import UserModuleSettings
from motet.parallel.data_parallel.fsdp import local_shard
from motet.parallel.process.process_group import RankGroup
from motet.train.build import build_components, build_model, precision_context
from motet.train.job import Job
from ranks import RankFailureError, Ranks
from train.runs import small_job

Shard = tuple[int, torch.Tensor]  # The first element, and the values


def local_values(group: RankGroup, job: Job, folder: str) -> tuple[dict[str, Shard], dict[str, Shard], list[str]]:
    """Masters and parameters that a rank holds after it was built, and what has memory before."""
    with precision_context(job):
        _, model = build_model(job, group.device, group)
        real = [name for name, parameter in model.module.named_parameters() if not parameter.is_meta]
        parts = build_components(job, group, Path(folder))
        parallel = parts.engine.optimizer.sharded_parameters
        masters = parallel.local_shards(parallel.local_masters)
        for name, parameter in parts.model.module.named_parameters():
            local = parameter.to_local() if isinstance(parameter, DTensor) else parameter
            assert not local.is_meta and local.is_contiguous(), name
        parameters = {name: local_shard(p) for name, p in parts.model.module.named_parameters()}
        both = [{n: (s.start, s.values.clone()) for n, s in each.items()} for each in (masters, parameters)]
        return both[0], both[1], real


def check(ranks: Ranks, job: Job, folder: Path, world: int) -> list[list[str]]:
    """Compare with a model that is built completely, by this process. Returns what ranks build completely."""
    dtypes = job.precision.resolved
    master, compute = getattr(torch, dtypes.master), getattr(torch, dtypes.compute)
    with precision_context(job):
        module = build_trainable_model(job.model, job.run.seed, master, torch.device("cpu")).module
        whole = {name: parameter.detach().flatten() for name, parameter in module.named_parameters()}
    held: dict[str, set[int]] = {name: set() for name in whole}
    results = ranks.run(world, local_values, job, str(folder))
    for masters, parameters, _ in results:
        assert parameters.keys() == whole.keys()
        assert all(values.dtype == master for _, values in masters.values())
        for name, (start, values) in (*masters.items(), *parameters.items()):
            stop = start + values.numel()
            assert values.dtype in (master, compute)
            assert torch.equal(values.flatten(), whole[name][start:stop].to(values.dtype)), name
            held[name].update(range(start, stop))
    assert all(len(held[name]) == len(values) for name, values in whole.items())
    return [real for _, _, real in results]


LAYOUTS = ["zero=0", "zero=1", "zero=2", "zero=3", "zero=3 min_shard_numel=100"]
OURS = [("decoder", ()), ("bert", ()), ("t5", ()), ("decoder", ("model.adapters={rank=2}",))]
OURS += [("decoder", ("model.frozen=['*.ffn.*']",))]


def layout_settings(layout: str) -> list[str]:
    return [f"layout.{word}" for word in layout.split()]


def proof_unless(condition: bool) -> Any:
    return () if condition else pytest.mark.proof


OUR_CASES = [
    pytest.param(*model, layout, marks=proof_unless(model == OURS[0] or layout == "zero=3"))
    for model in OURS
    for layout in LAYOUTS
]


@pytest.mark.parametrize(("model", "more", "layout"), OUR_CASES)
def test_our_models(ranks: Ranks, tmp_path: Path, model: str, more: tuple[str, ...], layout: str) -> None:
    for recipe in ("fp32", "bf16"):
        job = small_job(tmp_path, *layout_settings(layout), *more, f"precision.recipe={recipe}", model=model)
        assert check(ranks, job, tmp_path, 3) == [[], [], []]


HUGGING_FACE = [("llama", "fp32"), ("llama", "bf16"), ("qwen2", "fp64"), ("gpt2", "fp32"), ("adapters", "fp32")]
ALONE = RankGroup(0, 1, None, torch.device("cpu"))
SAVED: dict[str, dict[str, Any]] = {"one file": {}, "several files": {"max_shard_size": 20_000}}


def save_weights(job: Job, **how: Any) -> Path:
    """Give the folder of a Hugging Face config weights from another seed."""
    assert isinstance(job.model, UserModuleSettings) and job.model.hf_path is not None
    settings = job.model.model_copy(update={"adapters": None})
    whole: Any = build_trainable_model(settings, 99, torch.float32, torch.device("cpu")).module
    whole.save_pretrained(job.model.hf_path, **how)
    return Path(job.model.hf_path)


WEIGHTS_CASES = [
    pytest.param(
        layout, weights, marks=proof_unless((layout, weights) in (("zero=3", "several files"), ("zero=1", "random")))
    )
    for layout in LAYOUTS
    for weights in ("random", *SAVED)
]


@pytest.mark.parametrize(("layout", "weights"), WEIGHTS_CASES)
def test_hugging_face(ranks: Ranks, tmp_path: Path, layout: str, weights: str) -> None:
    """No rank has a complete parameter in memory where weights are read; random ones are on the first rank alone."""
    for model, recipe in HUGGING_FACE:
        job = small_job(tmp_path, *layout_settings(layout), f"precision.recipe={recipe}", model=model)
        if weights != "random":
            save_weights(job, **SAVED[weights])
        first, *others = check(ranks, job, tmp_path, 2)
        assert others == [[]] and bool(first) == (weights == "random"), model


def test_weights_that_transformers_converts_are_loaded_by_one_rank(ranks: Ranks, tmp_path: Path) -> None:
    job = small_job(tmp_path, "layout.zero=3", "precision.recipe=fp32", model="qwen2")
    folder = save_weights(job)
    weights = load_file(folder / "model.safetensors")
    table = weights["model.embed_tokens.weight"]
    for changed, said in (
        ({**weights, "lm_head.weight": table.clone()}, "model.embed_tokens.weight is not one tensor of shape"),
        ({f"base_{n}".removeprefix("base_model."): t for n, t in weights.items()}, "renames or converts"),
    ):
        save_file(changed, folder / "model.safetensors", metadata={"format": "pt"})
        first, second = check(ranks, job, tmp_path, 2)
        assert first and second == []
        assert said in str(find_weights(build_module(job.model, on_meta=True), folder)[1])


FACTORIES = {
    "Plain": [],
    "Tied": [],
    "RandomBuffers": [],
    "reads_a_value": ["head.bias", "head.weight", "table.weight"],
    "keeps_a_random_number": ["head.bias", "head.weight", "table.weight"],
    "assigns_data": ["head.bias", "head.weight", "table.weight"],
}


@pytest.mark.parametrize("layout", ["zero=0", "zero=3"])
@pytest.mark.parametrize("factory", FACTORIES)
def test_factories(ranks: Ranks, tmp_path: Path, factory: str, layout: str) -> None:
    """Only the first rank builds the complete module, unless another module comes out without values."""
    model = f"model={{factory='train.trainable_user_models:{factory}'}}"
    job = small_job(tmp_path, *layout_settings(layout), "precision.recipe=fp32", model)
    first, second = check(ranks, job, tmp_path, 2)
    assert first and sorted(second) == FACTORIES[factory]
    buffers = ranks.run(2, buffers_and_ties, job, str(tmp_path))
    assert buffers[0] == buffers[1] and buffers[0] == buffers_and_ties(ALONE, job, str(tmp_path))


def buffers_and_ties(group: RankGroup, job: Job, folder: str) -> tuple[dict[str, list[float]], list[str]]:
    model = build_components(job, group, Path(folder)).model
    names = [name for name, _ in model.module.named_parameters(remove_duplicate=False)]
    return {name: buffer.tolist() for name, buffer in model.module.named_buffers()}, names


@pytest.mark.parametrize(("kept", "is_complete"), [("list", False), ("drawn", True), ("read", True)])
def test_ranks_compute_alike_with_tensors_that_are_no_buffers(
    ranks: Ranks, tmp_path: Path, kept: str, is_complete: bool
) -> None:
    model = f"model={{factory='train.trainable_user_models:KeepsTensors', arguments={{kept='{kept}'}}}}"
    job = small_job(tmp_path, "layout.zero=1", "precision.recipe=fp32", model)
    first, second = check(ranks, job, tmp_path, 2)
    assert first and bool(second) == is_complete
    logits = ranks.run(2, logits_of_few_tokens, job, str(tmp_path))
    assert logits[0] == logits[1] == logits_of_few_tokens(ALONE, job, str(tmp_path))


def logits_of_few_tokens(group: RankGroup, job: Job, folder: str) -> list[float]:
    module = build_components(job, group, Path(folder)).model.module
    values: list[float] = module(torch.arange(8).view(2, 4)).flatten().tolist()
    return values


def test_weights_are_not_read_by_slices_where_a_buffer_is_computed_from_one(tmp_path: Path) -> None:
    """It would have no values, as the parameter has none."""
    job = small_job(tmp_path, "precision.recipe=fp32", model="llama")
    folder = save_weights(job)
    with parameters_on_meta():
        module = build_module(job.model, on_meta=True)
    assert find_weights(module, folder)[1] is None
    module.register_buffer("size", next(module.parameters()).detach().norm(), persistent=False)
    assert "size is computed from values of parameters" in str(find_weights(module, folder)[1])


def build_with_own_files(group: RankGroup, job: Job, folders: list[str]) -> tuple[str | None, float]:
    """The warning of a rank with this folder of weights, and the sum of a parameter."""
    assert isinstance(job.model, UserModuleSettings)
    settings = job.model.model_copy(update={"factory": f"hf:{folders[group.rank]}"})
    model = build_components(job.model_copy(update={"model": settings}), group, Path(folders[0])).model
    return model.remark, float(next(model.module.parameters()).detach().double().sum())


def test_a_file_that_is_damaged_on_one_machine_is_read_by_the_first_rank(ranks: Ranks, tmp_path: Path) -> None:
    job = small_job(tmp_path, "layout.zero=1", "precision.recipe=fp32", model="llama")
    whole = save_weights(job)
    damaged = Path(shutil.copytree(whole, tmp_path / "damaged"))
    data = (whole / "model.safetensors").read_bytes()
    (damaged / "model.safetensors").write_bytes(data[:-100])
    (remark, first), (_, second) = ranks.run(2, build_with_own_files, job, [str(whole), str(damaged)])
    assert first == second and "another rank cannot read slices of its files" in str(remark)
    with pytest.raises(RankFailureError, match="are damaged"):
        ranks.run(2, build_with_own_files, job, [str(damaged), str(whole)])
