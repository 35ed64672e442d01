"""Moments in bfloat16 and in 8 bits: the same bits on any number of data-parallel ranks, and the bytes of the plan."""

from pathlib import Path
from typing import Any

import pytest
import torch

import motet
from motet.core.errors import InputError
from motet.parallel.process.process_group import RankGroup
from motet.parallel.shard_spec import ShardSpec
from motet.parallel.step_plan.memory import model_state_memory
from motet.precision.recipe import block_elements, stored_bytes
from motet.train.build import build_components, precision_context
from motet.train.job import Job, load_job
from motet.train.optimizer.compact_moments_optimizer import (
    BlockwiseMoment,
    code_table,
    indices_in_whole,
    round_stochastically,
)
from ranks import Ranks
from train.runs import run_job, same_bits, saved_tensors, small_job, train, whole_tensor
from train.test_state_bytes import stored_tensors

CPU = torch.device("cpu")
MODEL = "model={family='decoder', vocab_size=260, context=32, layers=2, hidden=64, heads=4, ffn_hidden=192}"
FORMATS = ["bfloat16", "8bit"]


def job_of(folder: Path, dtype: str | None, *settings: str) -> Job:
    """A job with several buckets, whose shards begin and end within parameters."""
    cut = ["communication.bucket_mib=0.05", "communication.first_bucket_mib=0.02"]
    cut = [] if any("zero=3" in each or "tp=2" in each for each in settings) else cut
    moments = [f"precision.moment_dtype={dtype}"] if dtype else []
    return small_job(folder, "precision.recipe=fp32", MODEL, *moments, *cut, *settings)


# --- formats -------------------------------------------------------------------------------------------


def test_stochastic_rounding_has_the_value_as_its_mean() -> None:
    for value in (1.0, 1.001, -3.7e-5, 0.1, -2.5e20, 1e-39):
        values = torch.full((2**16,), value)
        rounded = round_stochastically(values, torch.arange(2**16, dtype=torch.int32) << 16)
        assert rounded.dtype == torch.bfloat16 and len(rounded.unique()) <= 2
        assert rounded.double().mean().item() == values[0].double().item()
    special = round_stochastically(torch.tensor([torch.inf, -torch.inf, torch.nan]), torch.full((3,), -1).int())
    assert special[:2].tolist() == [torch.inf, -torch.inf] and special[2].isnan()


@pytest.mark.parametrize("is_signed", [True, False])
def test_a_table_of_codes_holds_zero_one_and_seven_digits(is_signed: bool) -> None:
    table = code_table(is_signed=is_signed)
    assert len(table) == 256 - is_signed and list(table) == sorted(set(table)) and 0.0 in table and table[-1] == 1.0
    assert min(abs(number) for number in table if number) == pytest.approx(1e-6 if is_signed else 1e-7)
    if is_signed:
        assert [-number for number in reversed(table)] == list(table)


@pytest.mark.parametrize("is_signed", [True, False])
@pytest.mark.parametrize("block", [32, 256])
def test_decoded_values_are_stored_without_loss(is_signed: bool, block: int) -> None:
    torch.manual_seed(0)
    values = torch.randn(8 * block) * torch.logspace(-12, 10, 8).repeat_interleave(block)
    values = values if is_signed else values.square()
    values[:3] = torch.tensor([-0.0, 0.0, 1e-30])
    moment = BlockwiseMoment(len(values), block, is_signed=is_signed, device=CPU)
    whole = slice(0, len(values))
    assert not moment.read(whole, torch.float32).any()
    moment.write(whole, values, None)
    decoded = moment.read(whole, torch.float32)
    largest = values.abs().view(8, block).amax(1).repeat_interleave(block)
    spacing = 0.9 / (64 if is_signed else 128)
    assert ((decoded - values).abs() / largest).max() < 0.501 * spacing
    again = BlockwiseMoment(len(values), block, is_signed=is_signed, device=CPU)
    again.write(slice(0, 4 * block), decoded[: 4 * block], None)
    again.write(slice(4 * block, 8 * block), decoded[4 * block :], None)
    assert torch.equal(again.codes, moment.codes) and torch.equal(again.scales, moment.scales)
    assert torch.equal(again.read(whole, torch.float32), decoded)


def test_a_second_moment_that_is_not_zero_stays_so() -> None:
    moment = BlockwiseMoment(32, 32, is_signed=False, device=CPU)
    values = torch.tensor([1.0, 1e-20, 0.0] + [1e-12] * 29)
    moment.write(slice(0, 32), values, None)
    assert torch.equal(moment.read(slice(0, 32), torch.float32) > 0, values > 0)


def test_blocks_lie_in_rows() -> None:
    shapes = [(7,), (4, 1024), (4, 96), (4, 48), (4, 24), (3, 64, 3, 3), (5, 0), ()]
    assert [block_elements(shape) for shape in shapes] == [0, 256, 32, 16, 0, 64, 0, 0]
    assert stored_bytes("8bit", (4, 96), 96) == 96 + 3 * 4 and stored_bytes("bfloat16", (7,), 7) == 14


def test_indices_of_what_a_rank_holds_are_those_in_the_whole() -> None:
    spans = (((1, 3), (5, 6)), ((0, 4),), ((2, 3), (0, 2)))
    spec, numbers = ShardSpec((6, 4, 3), spans), torch.arange(72).view(6, 4, 3)
    expected = numbers[[1, 2, 5]][:, :, [2, 0, 1]].flatten()
    assert torch.equal(indices_in_whole(spec, torch.arange(36)), expected)
    assert torch.equal(indices_in_whole(spec, torch.arange(7, 19)), expected[7:19])
    padded = ShardSpec((5, 2), (((3, 5),), ((0, 2),)), (1, 0))
    assert indices_in_whole(padded, torch.arange(6))[:4].tolist() == [6, 7, 8, 9]


# --- layouts -------------------------------------------------------------------------------------------


def moments_after(group: RankGroup, job: Job, steps: int) -> tuple[list[float], dict[str, torch.Tensor]]:
    """The losses, and masters and moments as a checkpoint would hold them, from the shards of all ranks."""
    with precision_context(job):
        parts = build_components(job, group, Path("unused"))
        stepper = parts.make_train_step(job)
        losses = [stepper.step(step, 0.003).loss for step in range(steps)]
        state = parts.engine.optimizer.state_by_kind()
        return losses, {
            f"{kind}/{name}": whole_tensor(shard, group)
            for kind, shards in state.items()
            for name, shard in shards.items()
        }


LAYOUTS = [(2, ["layout.zero=1"]), (4, ["layout.zero=2"]), (3, ["layout.zero=3"])]
MORE_LAYOUTS = [
    (4, ["layout.zero=0"]),
    (4, ["layout.zero=1"]),
    (4, ["layout.zero=3"]),
    (3, ["layout.zero=2"]),
    (4, ["layout.zero=2", "layout.shard_group=2"]),
    (4, ["layout.zero=3", "layout.shard_group=2"]),
    (3, ["layout.zero=1", "communication.overlap=forward"]),
]
OPTIMIZERS: dict[str, list[str]] = {"adamw": [], "sgd": ["optimizer.name=sgd", "optimizer.momentum=0.9"]}


def check_layouts(ranks: Ranks, folder: Path, dtype: str, *settings: str, layouts: list[Any]) -> None:
    settings = ("run.reproducible=layout", "data.batch_sequences=8", *settings)
    [(losses, expected)] = ranks.run(1, moments_after, job_of(folder, dtype, *settings), 3)
    assert {key.partition("/")[0] for key in expected} > {"master"}
    for world, layout in layouts:
        job = job_of(folder, dtype, *settings, *layout)
        for own_losses, state in ranks.run(world, moments_after, job, 3):
            assert own_losses == losses and state.keys() == expected.keys()
            assert [n for n in state if not torch.equal(state[n].view(-1), expected[n].view(-1))] == [], (world, layout)


@pytest.mark.parametrize("dtype", ["8bit", pytest.param("bfloat16", marks=pytest.mark.proof)])
def test_every_number_of_ranks_has_the_same_moments_in_bits(ranks: Ranks, tmp_path: Path, dtype: str) -> None:
    check_layouts(ranks, tmp_path, dtype, layouts=LAYOUTS)


@pytest.mark.proof
@pytest.mark.parametrize("dtype", FORMATS)
@pytest.mark.parametrize("recipe", ["fp32", "bf16", "fp32 precision.master_dtype=float64"])
@pytest.mark.parametrize("optimizer", list(OPTIMIZERS))
def test_so_it_is_with_other_layouts_recipes_and_optimizers(
    ranks: Ranks, tmp_path: Path, dtype: str, recipe: str, optimizer: str
) -> None:
    settings = [*f"precision.recipe={recipe}".split(), *OPTIMIZERS[optimizer]]
    check_layouts(ranks, tmp_path, dtype, *settings, layouts=LAYOUTS + MORE_LAYOUTS)


@pytest.mark.parametrize("dtype", ["bfloat16", pytest.param("8bit", marks=pytest.mark.proof)])
def test_a_resumed_run_in_another_layout_has_the_same_bits(ranks: Ranks, tmp_path: Path, dtype: str) -> None:
    settings = ["run.reproducible=layout", "data.batch_sequences=8", "run.steps=4"]
    exception = "precision.exceptions=[{match=['embedding*','*.0.attention.*'], moment_dtype='float32'}]"
    settings += [exception] if dtype == "8bit" else []
    whole, resumed = tmp_path / "whole", tmp_path / "resumed"
    ranks.run_places(1, run_job, job_of(tmp_path, dtype, *settings), whole)
    for world, layout, stop in [(2, "layout.zero=2", "run.stop_at=2"), (1, "layout.zero=0", "run.stop_at=4")]:
        ranks.run_places(world, run_job, job_of(tmp_path, dtype, *settings, layout, stop), resumed)
    assert same_bits(saved_tensors(whole), saved_tensors(resumed))


def bytes_of_moments(group: RankGroup, job: Job) -> tuple[int, int]:
    """Counted by tensor, and as the plan says."""
    with precision_context(job):
        parts = build_components(job, group, Path("unused"))
        parts.make_train_step(job).step(0, 0.003)
        engine = parts.engine
        counted = sum(t.untyped_storage().nbytes() for t in stored_tensors(engine.optimizer))
        moments = job.optimizer.moments_per_parameter
        said = model_state_memory(engine.plan, job.precision.resolved, moments_per_parameter=moments, rank=group.rank)
        return counted, said.moments


@pytest.mark.parametrize("dtype", FORMATS)
@pytest.mark.parametrize(
    ("world", "layout"), [(3, "layout.zero=2"), (2, "layout.zero=3"), (2, "layout.tp=2"), (2, "layout.pp=2")]
)
def test_the_plan_says_the_bytes_of_moments(ranks: Ranks, tmp_path: Path, dtype: str, world: int, layout: str) -> None:
    job = job_of(tmp_path, dtype, layout)
    for counted, said in ranks.run(world, bytes_of_moments, job):
        assert counted == said > 0


@pytest.mark.parametrize("dtype", FORMATS)
def test_training_follows_moments_of_32_bits(ranks: Ranks, tmp_path: Path, dtype: str) -> None:
    plain, compact = (job_of(tmp_path, each, "optimizer.schedule.kind=constant") for each in (None, dtype))
    [expected], [result] = (ranks.run(1, train, job, 12) for job in (plain, compact))
    assert expected.losses[-1] < 0.9 * expected.losses[0]
    assert result.losses != expected.losses and result.losses == pytest.approx(expected.losses, rel=0.02)
    [split] = {tuple(each.losses) for each in ranks.run(2, train, job_of(tmp_path, dtype, "layout.tp=2"), 3)}
    assert split == pytest.approx(result.losses[:3], rel=0.01)


def test_stochastic_rounding_lets_moments_grow_by_less_than_half_a_unit() -> None:
    engine = motet.parallelize(
        torch.nn.Linear(64, 64, bias=False),
        loss=lambda module, x: (module(x).sum(), 1),
        precision={"recipe": "fp32", "moment_dtype": "bfloat16"},
        optimizer={"betas": (0.9, 0.999), "clip_norm": None},
    )
    for _ in range(300):
        engine.step(torch.ones(1, 64))
    moment = engine.optimizer.state_by_kind()["exp_avg_sq"]["weight"].values
    expected = 1 - 0.999**300  # Steps of 0.001, where half a unit in the last place of bfloat16 is 0.0005
    assert moment.mean().item() == pytest.approx(expected, rel=0.005)
    assert expected * 0.85 < moment.min() < moment.max() < expected * 1.15


def test_bad_settings_are_refused(tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"precision\.moment_dtype = '8bit' has no effect with precision\.recipe"):
        load_job("tiny", ["precision.recipe=fp64", "precision.moment_dtype=8bit"])
    with pytest.raises(InputError, match="moment_dtype"):
        load_job("tiny", ["precision.moment_dtype=int8"])
    exception = "precision.exceptions=[{match=['nothing*'], moment_dtype='float32'}]"
    with pytest.raises(InputError, match=r"has no effect with layout\.data = 'parameter_server'"):
        load_job("tiny", [exception, "layout.data=parameter_server"])
    with pytest.raises(InputError, match=r"precision\.exceptions: no trainable parameter's name matches 'nothing\*'"):
        build_components(job_of(tmp_path, "8bit", exception), RankGroup(0, 1, None, CPU), tmp_path)
