"""Loads, terms and corrections of mixtures against a definition by loops, and planted mistakes, each of which fails."""

import math
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from motet.core.batch import Batch
from motet.core.errors import InputError
from motet.models.arch.mixture.router import Router
from motet.parallel import sync_groups
from motet.parallel.process.module_inventory import load_buffers
from motet.parallel.process.process_group import RankGroup
from motet.train.balance import expert_balance, terms
from motet.train.balance.expert_balance import ExpertBalance, ExpertLoads
from motet.train.build import TrainingComponents, build_components, precision_context
from motet.train.job import Job
from motet.train.launch import entry_points
from motet.train.launch.entry_points import SupervisorIO, TrainRequest, supervise_local_ranks
from motet.train.launch.preflight import check_experts, check_job
from ranks import Ranks
from train.mixture_runs import (
    CORRECTIONS,
    FAMILIES,
    SCORES,
    TrainedMixture,
    check_equal,
    job_of_family,
    settings_of,
    train_mixture,
)

ALONE = RankGroup(0, 1, None, torch.device("cpu"))
TOLERANCE, STEPS = 1e-12, 3
WEIGHT, Z_WEIGHT, SPEED = 0.7, 0.3, 0.02
ROW = f"kind='row', weight={WEIGHT}, z_weight={Z_WEIGHT}"
BIAS = f"kind='bias', weight={WEIGHT}, z_weight={Z_WEIGHT}, speed={SPEED}"


@contextmanager
def built(job: Job, folder: Path) -> Iterator[TrainingComponents]:
    with precision_context(job):
        yield build_components(job, ALONE, folder)


def uneven_batch() -> Batch:
    """Three rows of 24 tokens: one with all targets, one with five, and one that only fills up the batch."""
    generator = torch.Generator().manual_seed(3)
    tokens = torch.randint(3, 260, (3, 25), generator=generator)  # Token 0 pads: its embedding has no gradient
    weights = torch.ones(3, 24)
    weights[1, 5:], weights[2] = 0, 0
    return Batch(tokens[:, :-1].clone(), tokens[:, 1:].clone(), weights, torch.arange(3))


@dataclass(frozen=True)
class Choice:
    """The output of a router for a batch."""

    logits: list[list[list[float]]]  # By row and token
    chosen: list[list[list[int]]]


def choices_of(parts: TrainingComponents, batch: Batch) -> tuple[list[Choice], Tensor]:
    """The outputs of all routers, and the sum of the losses, in a forward in which nothing is counted."""
    assert parts.engine.balance is not None
    choices, handles = [], []
    rows, tokens = batch.tokens.shape

    def keep(_: object, __: object, output: Any) -> None:
        logits, _, chosen = output
        choices.append(Choice(logits.view(rows, tokens, -1).tolist(), chosen.view(rows, tokens, -1).tolist()))

    for each in parts.engine.balance.layers:
        handles.append(parts.model.module.get_submodule(each.layer.router).register_forward_hook(keep))
    with torch.no_grad():
        loss = parts.model.loss_sum(batch)
    for handle in handles:
        handle.remove()
    return choices, loss


def loads_by_loops(choice: Choice, batch: Batch, experts: int) -> list[int]:
    counts = [0] * experts
    for row, chosen in enumerate(choice.chosen):
        for token in chosen if batch.weights[row].any() else ():
            for expert in token:
                counts[expert] += 1
    return counts


def terms_by_loops(choice: Choice, batch: Batch, scores: str, experts: int) -> float:
    """The terms of one layer, as the issue defines them."""
    total = 0.0
    for row, (logits, chosen) in enumerate(zip(choice.logits, choice.chosen, strict=True)):
        tokens, per_token, targets = len(logits), len(chosen[0]), batch.weights[row].sum().item()
        assignments, means, squares = [0] * experts, [0.0] * experts, 0.0
        for values, token in zip(logits, chosen, strict=True):
            positive = [math.exp(v) if scores == "softmax" else 1 / (1 + math.exp(-v)) for v in values]
            for expert in range(experts):
                means[expert] += positive[expert] / sum(positive) / tokens
            for expert in token:
                assignments[expert] += 1
            squares += math.log(sum(math.exp(v) for v in values)) ** 2 / tokens
        fractions = [experts / (per_token * tokens) * count for count in assignments]
        row_term = sum(f * p for f, p in zip(fractions, means, strict=True))
        total += targets * (WEIGHT * row_term + Z_WEIGHT * squares)
    return total


def total_by_loops(parts: TrainingComponents, batch: Batch) -> float:
    assert parts.engine.balance is not None
    choices, loss = choices_of(parts, batch)
    layers = zip(choices, parts.engine.balance.layers, strict=True)
    return loss.item() + sum(terms_by_loops(c, batch, e.scores, e.layer.count) for c, e in layers)


def counted_step(parts: TrainingComponents, batch: Batch) -> None:
    engine = parts.engine
    assert engine.balance is not None
    engine.begin_step()
    with engine.counting(engine.balance.rows_of(batch, engine.backward_scale)):
        engine.backward(parts.model.loss_sum(batch))


@pytest.mark.parametrize("family", ["mixtral", "motet", *(pytest.param(f, marks=pytest.mark.proof) for f in FAMILIES)])
def test_loads_terms_and_gradients_are_those_of_loops(family: str, tmp_path: Path) -> None:
    with built(job_of_family(tmp_path, family, BIAS if family in CORRECTIONS else ROW), tmp_path) as parts:
        engine, batch = parts.engine, uneven_batch()
        assert engine.balance is not None
        choices, loss = choices_of(parts, batch)
        expected_total = total_by_loops(parts, batch)
        counted_step(parts, batch)
        gradients = {
            name: shard.values.view(shard.shape).clone()
            for name, shard in engine.optimizer.sharded_parameters.local_shards(
                engine.optimizer.sharded_parameters.local_gradients()
            ).items()
        }
        check_gradients(parts, batch, gradients)
        stats = engine.update(0.0, loss, batch.weights.sum().item())
        assert stats.loss * stats.count == pytest.approx(expected_total, rel=TOLERANCE)
        assert stats.experts is not None
        for choice, each, layer in zip(choices, engine.balance.layers, stats.experts.layers, strict=True):
            assert each.scores == SCORES.get(family, "sigmoid")
            assert list(layer.loads) == loads_by_loops(choice, batch, each.layer.count)
            assert sum(layer.loads) == 2 * 24 * each.layer.per_token
            check_buffers(parts, each.layer.router, layer.loads, each.correction)


def check_gradients(parts: TrainingComponents, batch: Batch, gradients: dict[str, Tensor], step: float = 1e-6) -> None:
    """Central differences along a random direction of each parameter near routers, and of some others."""
    assert parts.engine.balance is not None
    generator, module = torch.Generator().manual_seed(5), parts.model.module
    routers = tuple(each.layer.router for each in parts.engine.balance.layers)
    names = [name for name in gradients if name.startswith(routers) or "norm" in name or "embed" in name]
    assert len(names) > len(routers)
    for name in names:
        parameter = module.get_parameter(name)
        direction = torch.randn(parameter.shape, generator=generator, dtype=torch.float64)
        direction /= direction.norm()  # A small step: no token chooses other experts
        values = []
        for sign in (1, -1):
            parameter.data += sign * step * direction
            values.append(total_by_loops(parts, batch))
            parameter.data -= sign * step * direction
        slope = (gradients[name] * direction).sum().item()
        assert (values[0] - values[1]) / (2 * step) == pytest.approx(slope, rel=1e-6, abs=1e-6), name


def check_buffers(parts: TrainingComponents, router: str, loads: tuple[int, ...], correction: str | None) -> None:
    buffers = load_buffers(parts.model.module)
    assert buffers[f"{router}.load"].tolist() == list(loads)
    if correction is not None:
        mean = sum(loads) / len(loads)
        signs = [(load < mean) - (load > mean) for load in loads]
        assert buffers[correction].tolist() == [SPEED * sign for sign in signs]


# --- planted mistakes --------------------------------------------------------------------------------


def pooled_values(self: terms.RowTerms, logits: Tensor, counts: Tensor, targets: Tensor) -> Tensor:
    """The terms of all tokens of a micro-batch together."""
    pooled = replace(self, row_tokens=self.row_tokens * len(counts))
    return VALUES(pooled, logits, counts.sum(0, keepdim=True), targets.sum(0, keepdim=True))


def keep_last_microbatch(self: ExpertBalance, rows: Any) -> Any:
    if not expert_balance.is_in_backward():
        self.begin_step()
    return ROWS(self, rows)


def apply_own_loads(self: ExpertBalance, loads: ExpertLoads) -> None:
    """Move the corrections by the loads of this rank alone."""
    own = [layer._replace(loads=tuple(mine.tolist())) for layer, mine in zip(loads.layers, self._loads, strict=True)]
    APPLY(self, replace(loads, layers=tuple(own)))


def apply_in_reverse(self: ExpertBalance, loads: ExpertLoads) -> None:
    self._settings = self._settings.model_copy(update={"speed": -abs(self._settings.speed)})
    APPLY(self, loads)


def half_gradient(ctx: Any, grad: Tensor) -> Any:
    return grad, torch.full((), ctx.scale / 2, dtype=ctx.dtype), None


def count_all_rows(self: ExpertBalance, batch: Batch, scale: float) -> Any:
    return ROWS_OF(self, replace(batch, weights=torch.ones_like(batch.weights)), scale)


def gradient_of_first_rank(ctx: Any, grad: Tensor) -> Any:
    term = torch.full((), ctx.scale if torch.distributed.get_rank() == 0 else 0.0, dtype=ctx.dtype)
    return grad, term, None


VALUES, ROWS, ROWS_OF = terms.RowTerms.values, ExpertBalance.rows, ExpertBalance.rows_of
APPLY, LOADS_OF = ExpertBalance.apply, ExpertBalance.loads_of
REPORTERS = sync_groups.METRIC_REPORTERS
# Mistake -> what is replaced, and the layout in which it shows.
MISTAKES: dict[str, tuple[object, str, object, str]] = {
    "loads are counted again in recomputation": (
        expert_balance, "is_in_backward", lambda: False, "recompute=full",
    ),
    "the term covers a micro-batch": (terms.RowTerms, "values", pooled_values, "microbatches=4"),
    "the last micro-batch alone counts": (ExpertBalance, "rows", keep_last_microbatch, "microbatches=4"),
    "the value of one rank is reported": (
        sync_groups, "METRIC_REPORTERS", {**REPORTERS, "loads": {"tp": 0, "dp": 0}}, "dp=2 zero=1",
    ),
    "the gradient of one rank is added": (
        expert_balance._AddGradient, "backward", staticmethod(gradient_of_first_rank), "dp=2 zero=1",
    ),
    "the counts of a part of the row": (expert_balance, "all_reduce", lambda *_: None, "cp=2"),
    "copies of the same tokens count": (sync_groups, "METRIC_REPORTERS", {**REPORTERS, "loads": {}}, "tp=2"),
    "parts of the tokens do not count": (
        sync_groups, "METRIC_REPORTERS", {**REPORTERS, "loads of parts": {"tp": 0}}, "tp=2 sp=true",
    ),
    "corrections follow the loads of a rank": (ExpertBalance, "apply", apply_own_loads, "dp=2 zero=1"),
    "corrections move to the fuller expert": (ExpertBalance, "apply", apply_in_reverse, "microbatches=1"),
    "the gradient lacks the scale": (
        expert_balance._AddGradient, "backward", staticmethod(half_gradient), "microbatches=1",
    ),
}  # fmt: skip
QUICK = {
    "loads are counted again in recomputation",
    "the term covers a micro-batch",
    "the last micro-batch alone counts",
}


def train_with_mistake(group: RankGroup, job: Job, mistake: str) -> TrainedMixture:
    owner, name, replacement, _ = MISTAKES[mistake] if mistake else (expert_balance, "is_in_backward", None, "")
    with pytest.MonkeyPatch.context() as patch:
        if mistake:
            patch.setattr(owner, name, replacement)
        return train_mixture(group, job, STEPS)


@pytest.mark.parametrize("mistake", [m if m in QUICK else pytest.param(m, marks=pytest.mark.proof) for m in MISTAKES])
def test_a_planted_mistake_changes_the_numbers(ranks: Ranks, tmp_path: Path, mistake: str) -> None:
    layout = MISTAKES[mistake][3]
    job = job_of_family(tmp_path, "motet", BIAS, *settings_of(layout))
    expected = train_mixture(ALONE, job_of_family(tmp_path, "motet", BIAS), STEPS)
    world = 1 if layout.startswith(("recompute", "microbatches")) else 2

    def run(planted: str) -> TrainedMixture:
        return (
            ranks.run(world, train_with_mistake, job, planted)[-1]
            if world > 1
            else train_with_mistake(ALONE, job, planted)
        )

    check_equal(run(""), expected)
    with pytest.raises(AssertionError):
        check_equal(run(mistake), expected)


def test_rows_that_fill_up_a_batch_would_be_noticed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with built(job_of_family(tmp_path, "motet", BIAS), tmp_path) as parts:
        batch, counted = uneven_batch(), []
        for planted in (False, True):
            if planted:
                monkeypatch.setattr(ExpertBalance, "rows_of", count_all_rows)
            counted_step(parts, batch)
            stats = parts.engine.update(0.0, 1.0, 29.0)
            assert stats.experts is not None
            counted.append(sum(stats.experts.layers[0].loads))
    assert counted == [2 * 2 * 24, 3 * 2 * 24]


def test_a_correction_in_the_weights_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    forward = Router.forward

    def planted(self: Router, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        logits, weights, chosen = forward(self, x)
        return logits, weights if self.correction is None else weights + self.correction[chosen], chosen

    monkeypatch.setattr(Router, "forward", planted)
    with pytest.raises(InputError, match=r"changes the choice .* and not its weights, and of blocks"):
        train_mixture(ALONE, job_of_family(tmp_path, "motet", "kind='bias'"), 1)


@pytest.mark.parametrize("planted", [False, True])
def test_a_skipped_step_and_an_evaluation_change_nothing(
    tmp_path: Path, planted: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The second step has a loss that is not finite; an evaluation lies between the first and the second."""
    job = job_of_family(tmp_path, "motet", BIAS)
    with built(job, tmp_path) as parts:
        stepper, engine = parts.make_train_step(job), parts.engine

        def apply_before_the_decision(self: ExpertBalance, sums: Any) -> Any:
            """Move corrections whether or not the step updates, where nothing takes them back."""
            result = LOADS_OF(self, sums)
            APPLY(self, result[0])
            engine.buffers_at_step_start.update(load_buffers(engine.module))
            return result

        stepper.step(0, 1e-3)
        before = {name: buffer.clone() for name, buffer in load_buffers(engine.module).items()}
        assert len(before) == 4 and all(buffer.any() for buffer in before.values())
        assert engine.balance is not None
        counted = engine.balance.local_numbers()
        assert parts.evaluate(job, "validation") is not None
        assert torch.equal(engine.balance.local_numbers(), counted)
        counted_step(parts, uneven_batch())
        if planted:
            monkeypatch.setattr(ExpertBalance, "loads_of", apply_before_the_decision)
        assert not engine.update(1e-3, math.nan, 29.0).is_finite
        same = all(torch.equal(buffer, before[name]) for name, buffer in load_buffers(engine.module).items())
    assert same != planted


def test_an_evaluation_that_counts_would_be_noticed(tmp_path: Path) -> None:
    job = job_of_family(tmp_path, "motet", BIAS)
    with built(job, tmp_path) as parts:
        assert parts.engine.balance is not None
        parts.engine.begin_step()
        batch = parts.data.evaluation_batch("validation", 0, range(8))
        with parts.engine.counting(parts.engine.balance.rows_of(batch, 1.0)):  # The mistake
            parts.evaluate(job, "validation")
        assert parts.engine.balance.local_numbers().any()


def compared(group: RankGroup, job: Job, planted: bool) -> tuple[str, ...]:
    with pytest.MonkeyPatch.context() as patch:
        if planted:
            patch.setattr(ExpertBalance, "apply", apply_own_loads)
        with precision_context(job):
            parts = build_components(job, group, Path(job.data.cache) / "run")
            stepper = parts.make_train_step(job)
            checks = [stepper.step(step, 1e-3).replica_check for step in range(2)]
    return tuple(text for check in checks if check for text in check.violations)


def test_a_replica_check_finds_other_corrections(ranks: Ranks, tmp_path: Path) -> None:
    job = job_of_family(tmp_path, "motet", BIAS, "monitor.replica_check_every=1", "layout.zero=1")
    assert ranks.run(2, compared, job, False) == [(), ()]
    first, *_ = ranks.run(2, compared, job, True)[0]
    assert "other loads or corrections of experts" in first and "first in blocks.0.ffn.router" in first


def test_bad_input_is_refused(tmp_path: Path) -> None:
    cases = {
        "motet finds none in": ("kind='row'", "llama", {}),
        "'bias' moves a buffer of 4 numbers .* and it has no such buffer": ("kind='bias'", "mixtral", {}),
        "draws random numbers in training.*set model.arguments.router_jitter_noise = 0": (
            "kind='row'", "mixtral", {"router_jitter_noise": 0.1},
        ),
        "gives each token all 4 experts": ("kind='row'", "mixtral", {"num_experts_per_tok": 4}),
    }  # fmt: skip
    FAMILIES["llama"] = {key: value for key, value in FAMILIES["mixtral"].items() if "experts" not in key}
    try:
        for message, (balance, family, more) in cases.items():
            with pytest.raises(InputError, match=message):
                train_mixture(ALONE, job_of_family(tmp_path, family, balance, **more), 1)
    finally:
        del FAMILIES["llama"]
    with pytest.raises(InputError, match=r"set model.arguments.router_jitter_noise = 0"):  # Also without a balance
        train_mixture(ALONE, job_of_family(tmp_path, "mixtral", "", router_jitter_noise=0.1), 1)


@pytest.mark.parametrize("family", ["motet", "mixtral"])
def test_workers_of_servers_are_refused_before_ranks_start(tmp_path: Path, family: str) -> None:
    job = job_of_family(tmp_path, family, ROW, "layout.data=parameter_server")
    with pytest.raises(InputError, match=r"loads of experts are sums over the ranks that take a step together"):
        check_job(job, 4)
    collectives = ("layout.data=parameter_server", "layout.server.transport=collectives")
    check_job(job_of_family(tmp_path, family, ROW, *collectives), 2)
    check_job(job_of_family(tmp_path, "mixtral", "", "layout.data=parameter_server"), 4)


def test_corrections_of_independent_replicas_are_refused(tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"outer.every = 3 .* moves one correction .* use model.balance.kind = 'row'"):
        check_job(job_of_family(tmp_path, "motet", BIAS, "outer.every=3"), 2)
    check_job(job_of_family(tmp_path, "motet", ROW, "outer.every=3"), 2)


REFUSED_BY_FILES: dict[str, tuple[str, str, dict[str, Any]]] = {
    "it has no such buffer; use model.balance.kind = 'row'": ("mixtral", "kind='bias'", {}),
    "set model.arguments.router_jitter_noise = 0": ("mixtral", "", {"router_jitter_noise": 0.1}),
    "no setting turns that off: take another model": ("phimoe", "", {}),
    "motet finds none in": ("jetmoe", "kind='row'", {}),
}


@pytest.mark.parametrize("message", REFUSED_BY_FILES)
def test_experts_are_refused_before_ranks_start(tmp_path: Path, message: str, monkeypatch: pytest.MonkeyPatch) -> None:
    family, balance, more = REFUSED_BY_FILES[message]
    job = job_of_family(tmp_path, family, balance, **more)
    monkeypatch.setattr(entry_points, "launch_ranks", lambda *_, **__: pytest.fail("ranks are started"))
    with pytest.raises(InputError, match=message) as error:
        supervise_local_ranks(TrainRequest(job, None, []), SupervisorIO({}, print, nullcontext))
    assert str(error.value).count(". ") == 0


def test_other_mixtures_pass_that_check(tmp_path: Path) -> None:
    for family, balance in (("deepseek_v3", BIAS), ("mixtral", ROW), ("motet", BIAS)):
        check_experts(job_of_family(tmp_path, family, balance), print)


def test_nothing_is_counted_without_a_section(tmp_path: Path) -> None:
    result = train_mixture(ALONE, job_of_family(tmp_path, "mixtral", ""), 1)
    assert not result.experts and not result.buffers
