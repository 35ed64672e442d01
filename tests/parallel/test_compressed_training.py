"""Compressed sums and gathers in training: what is exact, what is given again, and that replicas agree."""

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import motet
from motet.parallel.data_parallel.bucketed_zero import BucketedDataParallel
from motet.parallel.process.process_group import RankGroup
from motet.train.engine import TrainingEngine
from motet.train.state import newest_checkpoint
from ranks import Ranks

Case = tuple[str, dict[str, Any]]
"""A layout, and how ranks communicate in it."""
BUCKETS: dict[str, Any] = {"bucket_mib": 1e-3, "first_bucket_mib": 1e-4}
BLOCKWISE = ["int8:rounding=stochastic", "int4:levels=quantile", "float8", "sign"]
OTHERS = ["topk:keep=0.1", "randomk:keep=0.3,unbiased=false", "powersgd:rank=1"]


class Tower(nn.Module):
    """Blocks of matrices and vectors, whose rows do not divide."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(7, 24)
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(24, 17), nn.Tanh(), nn.Linear(17, 24)) for _ in range(2))
        self.last = nn.Linear(24, 5)
        self.scale = nn.Parameter(torch.tensor(0.7))

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        for block in self.blocks:
            x = x + block(x)
        return self.last(x) * self.scale


def given(rank: int, step: int) -> Tensor:
    return torch.randn(6, 7, generator=torch.Generator().manual_seed(100 * rank + step))


def engine_of(case: Case, precision: str = "fp32") -> TrainingEngine:
    layout, communication = case
    torch.manual_seed(5)
    sections = BUCKETS if "zero=3" not in layout else {}
    return motet.parallelize(
        Tower().double() if precision == "fp64" else Tower(),
        layout,
        loss=lambda module, x: (module(x.to(next(module.parameters()).dtype)).square().sum(), 30),
        optimizer={"name": "sgd", "learning_rate": 0.05, "momentum": 0.5, "clip_norm": None},
        precision=precision,
        communication={**sections, **communication},
    )


def steps(engine: TrainingEngine, group: RankGroup, first: int, count: int) -> list[Tensor]:
    """The output of this rank's model after each step."""
    answers = []
    for step in range(first, first + count):
        engine.step(given(group.rank, step))
        with torch.no_grad():
            answers.append(engine.module(given(99, 0).to(next(engine.module.parameters()).dtype)).clone())
    return answers


def trained(group: RankGroup, cases: list[Case], precision: str = "fp32", count: int = 3) -> list[list[Tensor]]:
    return [steps(engine_of(case, precision), group, 0, count) for case in cases]


def all_agree(rank_answers: list[list[list[Tensor]]]) -> None:
    for answers in zip(*rank_answers, strict=True):
        for step in zip(*answers, strict=True):
            assert step[0].isfinite().all() and all(torch.equal(answer, step[0]) for answer in step)
        assert not torch.equal(answers[0][0], answers[0][-1])


def test_replicas_have_the_same_bits_after_every_step(ranks: Ranks) -> None:
    cases: list[Case] = []
    for codec in BLOCKWISE + OTHERS:
        cases += [(f"zero={zero}", {"compress_gradients": codec}) for zero in (0, 1, 2)]
    for codec in BLOCKWISE:
        cases.append(("zero=3", {"compress_gradients": codec, "compress_parameters": codec}))
        cases.append(("zero=1", {"compress_parameters": codec, "overlap": "forward"}))
    all_agree(ranks.run(2, trained, cases))


def test_so_they_have_where_only_some_ranks_share_a_copy(ranks: Ranks) -> None:
    cases: list[Case] = []
    for codec in ["int8", OTHERS[-1]]:
        slow = {"compress_gradients": codec, "compress_over": "replicas"}
        cases += [("zero=2 shard_group=2", {"compress_gradients": codec}), ("zero=3 shard_group=2", slow)]
    both = {"compress_gradients": "int4", "compress_parameters": "int8"}
    cases += [("zero=2 shard_group=2", both | {"compress_over": "shards"}), ("zero=3 shard_group=2", both)]
    cases += [("zero=3 secondary_group=2", both)]
    all_agree(ranks.run(4, trained, cases))


def test_codecs_that_lose_nothing_change_nothing(ranks: Ranks) -> None:
    """int8 in blocks of one number sends that number, and two numbers have the same sum in either order."""
    layouts = ["zero=0", "zero=1", "zero=2", "zero=3"]
    plain = ranks.run(2, trained, [(layout, {}) for layout in layouts])
    coded: list[Case] = [(layout, {"compress_gradients": "int8:block=1"}) for layout in layouts]
    both = {"compress_gradients": "int8:block=1", "compress_parameters": "int8:block=1"}
    coded += [(layout, both) for layout in layouts[1:]]
    found = ranks.run(2, trained, coded)
    for rank in (0, 1):
        for (layout, how), got, exact in zip(coded, found[rank], plain[rank] + plain[rank][1:], strict=True):
            assert all(map(torch.equal, got, exact)), (layout, how)


ALL = ["topk:keep=1", "randomk:keep=1,unbiased=false", "powersgd:rank=99"]


def test_so_do_those_that_keep_everything(ranks: Ranks) -> None:
    layouts = ["zero=0", "zero=1", "zero=2 shard_group=2"]
    cases: list[Case] = [(layout, {}) for layout in layouts]
    cases += [(layout, {"compress_gradients": codec}) for codec in ALL for layout in layouts]
    slow = {"compress_gradients": "topk:keep=1", "compress_over": "replicas"}
    cases += [("zero=3 shard_group=2", slow), ("zero=3 secondary_group=2", {}), ("zero=3 secondary_group=1", {})]
    wanted, *others = ranks.run(4, trained, cases, "fp64")[0]
    for case, found in zip(cases[1:], others, strict=True):
        limit = 1e-6 if "powersgd" in str(case) else 1e-12  # factors are float32
        for a, b in zip(found, wanted, strict=True):
            assert ((a - b).norm() / b.norm()).item() < limit, case


def test_one_rank_has_nothing_to_compress(ranks: Ranks) -> None:
    how = {"compress_gradients": "topk:keep=0.1", "compress_parameters": "int8"}
    cases: list[Case] = [("zero=1", {}), ("zero=1", how)]
    plain, coded = ranks.run(1, trained, cases)[0]
    assert all(map(torch.equal, plain, coded))


# --- what is lost, and given again -----------------------------------------------------------------
def sent_and_owed(group: RankGroup, case: Case, parts: int, count: int) -> tuple[Tensor, Tensor, Tensor]:
    """(all sums that were handed out, all gradients, all errors at the end), summed over steps and ranks."""
    engine = engine_of(case, "fp64")
    (spread,) = engine.optimizer.sharded_parameters.engines
    assert isinstance(spread, BucketedDataParallel)
    named = dict(engine.module.named_parameters())
    where = {m.name: slice(m.start, m.stop) for bucket in spread.flat_parameters.buckets for m in bucket.members}
    length = spread.flat_parameters.buckets[-1].stop
    out, true, owed = (torch.zeros(length, dtype=torch.float64) for _ in range(3))
    for step in range(count):
        engine.begin_step()
        for part in range(parts):
            draw = torch.Generator().manual_seed(1000 * step + 10 * group.rank + part)
            slopes = {n: torch.randn(p.shape, generator=draw, dtype=p.dtype) for n, p in named.items()}
            for name, slope in slopes.items():
                true[where[name]] += slope.flatten()
            loss = sum(((p * slopes[n]).sum() for n, p in named.items()), torch.zeros(()))
            engine.backward(loss, part == 0, part == parts - 1)
        for name, piece in spread.local_shards(spread.local_gradients()).items():
            first = where[name].start + piece.start
            out[first : first + piece.values.numel()] += piece.values
    state = spread.communicator.compression_state().items()
    rows = [row for name, row in state if "errors" in name]
    owed += rows[0] if rows else 0
    for total in (true, owed, *([out] if "zero=0" not in case[0] else [])):
        dist.all_reduce(total)
    return out, true, owed


OWED = ["int4:levels=quantile", "topk:keep=0.1", "powersgd:rank=1"]


@pytest.mark.parametrize(
    "codec", [*OWED, *(pytest.param(c, marks=pytest.mark.proof) for c in (*BLOCKWISE, *OTHERS) if c not in OWED)]
)
def test_what_was_not_sent_is_owed(ranks: Ranks, codec: str) -> None:
    """The sum is exact up to rounding, which is that of float32 where factors are multiplied."""
    limit = 1e-5 if "powersgd" in codec else 1e-13
    for layout, parts in (("zero=0", 1), ("zero=2 microbatches=2", 2)):
        for out, true, owed in ranks.run(3, sent_and_owed, (layout, {"compress_gradients": codec}), parts, 4):
            assert owed.norm() > 1e-3 * true.norm() and (out + owed - true).norm() < limit * true.norm()
    off = {"compress_gradients": codec, "error_feedback": False}
    out, true, owed = ranks.run(3, sent_and_owed, ("zero=1", off), 1, 4)[0]
    assert owed.count_nonzero() == 0 and (out - true).norm() > 1e-3 * true.norm()


def arrivals(group: RankGroup, feeds_back: bool) -> int:
    """How many numbers of a gradient that stays the same have arrived after some steps, of 960."""
    module, slope = nn.Linear(40, 24, bias=False), torch.arange(960.0).view(24, 40) + 960
    how = {"compress_gradients": "topk:keep=0.1", "error_feedback": feeds_back}
    engine = motet.parallelize(module, "zero=2", communication=how)
    seen = torch.zeros(960)
    for _ in range(20):
        engine.begin_step()
        engine.backward((module.weight * slope).sum())
        spread = engine.optimizer.sharded_parameters
        for piece in spread.local_shards(spread.local_gradients()).values():
            seen[piece.start : piece.start + piece.values.numel()] += piece.values.abs()
    dist.all_reduce(seen)
    return int(seen.count_nonzero())


def test_without_feedback_small_numbers_never_arrive(ranks: Ranks) -> None:
    assert ranks.run(2, arrivals, True) == [960, 960] and ranks.run(2, arrivals, False) == [96, 96]


def after_a_bad_step(group: RankGroup) -> list[bool]:
    finite = []
    for codec in ("int8", "topk:keep=0.1", "powersgd:rank=1"):
        engine = engine_of(("zero=1", {"compress_gradients": codec}))
        for step in range(3):
            x = given(group.rank, step)
            finite.append(engine.step(x * float("inf") if step == 1 and group.rank == 0 else x).is_finite)
        (parallel,) = engine.optimizer.sharded_parameters.engines
        finite.append(all(kept.isfinite().all() for kept in parallel.communicator.compression_state().values()))
    return finite


def test_a_step_that_is_not_finite_leaves_nothing_behind(ranks: Ranks) -> None:
    assert ranks.run(2, after_a_bad_step) == [[True, False, True, True] * 3] * 2


def test_the_first_steps_are_as_they_would_be_without(ranks: Ranks) -> None:
    plain: Case = ("zero=1", {})
    warm: Case = ("zero=1", {"compress_gradients": "sign", "compress_after": 2})
    one, other = ranks.run(2, trained, [plain, warm])[0]
    assert [torch.equal(a, b) for a, b in zip(one, other, strict=True)] == [True, True, False]


# --- checkpoints -----------------------------------------------------------------------------------
ERRORS: list[Case] = [
    ("zero=0", {"compress_gradients": "powersgd:rank=1"}),
    ("zero=1", {"compress_gradients": "int4:rounding=stochastic", "compress_parameters": "int8:rounding=stochastic"}),
    ("zero=2 shard_group=2", {"compress_gradients": "powersgd:rank=1", "compress_after": 1}),
    ("zero=3 shard_group=2", {"compress_gradients": "topk:keep=0.2", "compress_over": "replicas"}),
    ("zero=3 secondary_group=2", {"compress_gradients": "int8", "compress_parameters": "int8:rounding=stochastic"}),
]


def interrupted(group: RankGroup, folder: str) -> list[bool]:
    same = []
    for number, case in enumerate(ERRORS):
        whole, first = steps(engine_of(case), group, 0, 5), engine_of(case)
        steps(first, group, 0, 3)
        first.save(f"{folder}/{number}", 3)
        second = engine_of(case)
        assert second.restore(f"{folder}/{number}") == 3
        same.append(all(map(torch.equal, steps(second, group, 3, 2), whole[3:])))
    return same


def elsewhere(group: RankGroup, folder: str) -> list[list[str]]:
    """Warnings when the checkpoints are read in another layout, or by other means."""
    said = []
    for number, case in enumerate([("zero=2", ERRORS[0][1]), ("zero=1", {}), ERRORS[2], ("zero=2", {}), ("", {})]):
        where = newest_checkpoint(Path(folder) / f"{number}")
        assert where is not None
        engine = engine_of(case)
        said.append(engine.training_state(folder).restore(where)[1])
        steps(engine, group, 3, 1)
    return said


def test_an_interrupted_run_goes_on_with_the_same_bits(ranks: Ranks, tmp_path: Path) -> None:
    assert ranks.run(4, interrupted, str(tmp_path)) == [[True] * len(ERRORS)] * 4
    for told in ranks.run(4, elsewhere, str(tmp_path)):
        left_out = ["the checkpoint was made with other ranks, buckets or compression"]
        beginnings = [[text.partition(":")[0] for text in texts] for texts in told]
        assert beginnings == [left_out, left_out, [], left_out, []]


@pytest.mark.proof
def test_second_copies_in_two_replicas(ranks: Ranks) -> None:
    layout = "zero=3 shard_group=4 secondary_group=2"
    how = {"compress_gradients": "int8", "compress_parameters": "int8"}
    cases: list[Case] = [("zero=0", {}), (layout, {}), (layout, how)]
    found = ranks.run(8, trained, cases, "fp64", timeout_s=300)
    all_agree(found)
    for a, b in zip(found[0][1], found[0][0], strict=True):
        assert ((a - b).norm() / b.norm()).item() < 1e-12
