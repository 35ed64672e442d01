"""Hypotheses about mixtures of experts: limits, weights, loads, the terms that balance loads, and corrections.

One device routes the rows of a micro-batch, and a mistake is made with the result, to see whether it gives the numbers
that a rank has recorded.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from motet.models.arch.mixture.mixture_of_experts import CapacityLimit, dropped_assignments
from motet.models.settings import BalanceSettings, MixtureOfExpertsSettings
from motet.parallel.layout import microbatches_of_rank
from motet.parallel.model_sharding import TENSOR_DIMENSION
from motet.parallel.proof.module_calls import Path, arguments_of, value_at
from motet.parallel.sync_groups import reports
from motet.parity.diagnose import mismatch_evidence as fit
from motet.parity.diagnose.attention_mistakes import places_of
from motet.parity.diagnose.mismatch_evidence import LocatedDifference, MicroBatchContribution, MismatchEvidence
from motet.parity.diagnose.tensor_hypotheses import Hypothesis, is_scaled
from motet.parity.record.activation_parts import cut_part, module_of
from motet.parity.record.tensor_recorder import BALANCE_LOSS, TensorKey
from motet.parity.subjects.job_subject import JobVerificationSubject
from motet.train.balance.balanced_layers import BalancedLayer, balance_of_model
from motet.train.balance.terms import RowTerms, row_counts

FORWARDS = "forwards of a block that backward computes again"


@dataclass(frozen=True)
class RoutedTokens:
    """The routing of some rows in one layer, on one device."""

    located: LocatedDifference
    layer: BalancedLayer
    rows: tuple[int, ...]
    logits: Tensor
    weights: Tensor
    chosen: Tensor  # Before a limit
    kept: Tensor  # As experts get it: a dropped assignment has an index behind the last expert

    @property
    def targets(self) -> Tensor:
        """[R], the sum of the weights of the targets of each row."""
        sample = self.located.reference.tensors[TensorKey("sample", "weights")]
        return sample.value[[sample.rows.index(row) for row in self.rows]].reshape(len(self.rows), -1).double().sum(1)

    def part(self, tensor: Tensor, rank: int | None) -> Tensor:
        """The tokens of a rank."""
        planned = self.located.recompute.planned
        if planned is None or rank is None:
            return tensor
        label = _label(self.layer, self.layer.layer.output.logits)
        spec = planned.activations.spec(label, rank, tuple(tensor.shape), rows=len(self.rows))
        return tensor if spec is None else cut_part(tensor, spec)

    def loads(self, rank: int, *, counts_all_rows: bool = False) -> Tensor:
        """[E + 1]: the assignments of a rank's tokens to each expert, and the assignments that a limit drops."""
        is_counted = (self.targets > 0) | counts_all_rows
        chosen, kept = (self.part(each, rank) for each in (self.chosen, self.kept))
        by_row = row_counts(chosen, len(self.rows), self.layer.layer.count)
        dropped = (kept == self.layer.layer.count).reshape(len(self.rows), -1).sum(1, keepdim=True)
        return (torch.cat([by_row, dropped], 1) * is_counted.unsqueeze(1)).sum(0).double()

    def term_gradient(self, settings: BalanceSettings, counts: Tensor, targets: Tensor) -> Tensor:
        """The gradient of terms with these counts [R, E] and targets [R], or with the tokens of all rows together."""
        tokens = self.located.reference.row_tokens * len(self.rows) // len(counts)
        with torch.enable_grad():
            logits = self.logits.detach().requires_grad_()
            values = RowTerms(settings, self.layer.scores, self.layer.layer.per_token, tokens).values
            (gradient,) = torch.autograd.grad(values(logits, counts, targets).sum(), logits)
        return gradient


def _label(layer: BalancedLayer, path: Path) -> str:
    return layer.layer.router + "".join(f"[{key}]" for key in path)


def _layers(e: MismatchEvidence, name_of: Callable[[BalancedLayer], str | None] | None = None) -> list[BalancedLayer]:
    """The balanced layers, or the one with the name of the tensor that differs."""
    balance = e.source.recompute.rank_subject.engine.balance
    return [each for each in (balance.layers if balance else ()) if name_of is None or name_of(each) == e.name]


def _settings(e: MismatchEvidence) -> BalanceSettings:
    subject = e.source.recompute.subject
    settings = balance_of_model(subject.job.model) if isinstance(subject, JobVerificationSubject) else None
    return settings or BalanceSettings()


def _route(located: LocatedDifference, layer: BalancedLayer, rows: Sequence[int]) -> RoutedTokens:
    recompute, routed, outputs, kept = located.recompute, layer.layer, list[object](), list[Tensor]()
    router, experts = (recompute.module.get_submodule(name) for name in (routed.router, routed.experts))
    hooks = [
        router.register_forward_hook(lambda *call: outputs.append(call[-1])),
        experts.register_forward_pre_hook(
            lambda _, *call: kept.append(value_at(arguments_of(*call), routed.indices)), with_kwargs=True
        ),
    ]
    try:
        with recompute.restored_to(recompute.step):
            recompute.run_rows(range(rows[0], rows[-1] + 1), with_backward=False)
    finally:
        for hook in hooks:
            hook.remove()
    paths = routed.output.logits, routed.output.weights, routed.output.chosen
    logits, weights, chosen = (value_at(outputs[-1], path) for path in paths)
    return RoutedTokens(located, layer, tuple(rows), logits, weights, chosen, kept[-1])


def _rows_of_worst(e: MismatchEvidence, layers: Sequence[BalancedLayer]) -> RoutedTokens | None:
    record = e.source.worst_pair.record
    is_known = layers and record is not None and not record.is_sketched and record.rows
    return _route(e.source, layers[0], record.rows) if is_known and record else None


# --- limits and weights --------------------------------------------------------------------------------


def limit_differs(e: MismatchEvidence) -> str:
    """The weights after a limit, which another limit leaves."""
    limit, parent = e.source.recompute.module.get_submodule(module_of(e.name)), module_of(e.name).rpartition(".")[0]
    if not isinstance(limit, CapacityLimit):
        return ""
    routed = _rows_of_worst(e, [each for each in _layers(e) if each.layer.router.startswith(f"{parent}.")])
    for words, weights in _limited_weights(routed, limit.experts, e.rank) if routed else ():
        if weights.numel() == e.value.numel() and fit.is_equal_up_to_rounding(weights.reshape(e.value.shape), e.value):
            return words + e.source.location_text()
    return ""


def _limited_weights(
    routed: RoutedTokens, settings: MixtureOfExpertsSettings, rank: int | None
) -> Iterator[tuple[str, Tensor]]:
    """The weights of a rank's tokens after limits with a mistake."""

    def limited(weights: Tensor, chosen: Tensor) -> Tensor:
        return weights.masked_fill(dropped_assignments(weights, chosen, settings), 0)

    rows, planned = (routed.weights, routed.chosen), routed.located.recompute.planned
    parts = [routed.part(each, rank) for each in rows]
    yield "its limit is that of the part of a rank, not of the complete row", limited(parts[0], parts[1])
    joined = [each.flatten(0, 1).unsqueeze(0) for each in rows]
    together = limited(joined[0], joined[1]).view_as(routed.weights)
    yield "its limit is that of the micro-batch, not of each row", routed.part(together, rank)
    if planned is not None and (tokens := planned.activations.tokens) is not None:
        order = torch.cat([places_of(tokens.partition, index) for index in range(tokens.partition.ranks)])
        by_rank = limited(*(each[:, order] for each in rows))
        words = "its limit takes the tokens of a row in the order of ranks, not of places"
        yield words, routed.part(torch.empty_like(by_rank).index_copy_(1, order, by_rank), rank)
    yield "no limit drops any assignment", parts[0]
    right = limited(*rows)
    normalized = right / right.sum(-1, keepdim=True).clamp(min=torch.finfo(right.dtype).tiny)
    yield "weights are divided by their sum again after a limit has dropped some", routed.part(normalized, rank)


def weights_are_corrected(e: MismatchEvidence) -> str:
    """The weights of a router with the correction in them, which is for the choice alone."""
    routed = _rows_of_worst(e, _layers(e, lambda each: _label(each, each.layer.output.weights)))
    if routed is None or (name := routed.layer.correction) is None:
        return ""
    scores = routed.logits.softmax(-1) if routed.layer.scores == "softmax" else routed.logits.sigmoid()
    correction = e.source.recompute.state_before_step[f"buffer/{name}"].to(scores.dtype)
    weights = [each.gather(-1, routed.chosen) for each in (scores, scores + correction)]
    for plain, corrected in (weights, [each / each.sum(-1, keepdim=True) for each in weights]):
        expected, wrong = (routed.part(each, e.rank).reshape(e.value.shape) for each in (plain, corrected))
        factors = fit.solve_coefficients(e.expected, [expected])
        if factors and fit.is_equal_up_to_rounding(e.value, factors[0] * wrong):
            return f"its scores have the correction {name} in them, which is for the choice alone"
    return ""


# --- loads and corrections -----------------------------------------------------------------------------


def _contributions(
    located: LocatedDifference, layer: BalancedLayer, *, is_extra: bool = False, counts_all_rows: bool = False
) -> list[MicroBatchContribution]:
    """The loads of the tokens of each rank in each micro-batch; with `is_extra` in rows that are computed again."""
    recompute, planned = located.recompute, located.recompute.planned
    if planned is None:
        return []
    dims, label = recompute.layout.dims, _label(layer, layer.layer.output.logits)
    is_part = any(split.over == TENSOR_DIMENSION for split in planned.activations.splits(label) or ())
    groups = planned.row_groups_of(TensorKey("activation", label), range(dims.ranks))
    metric, routed, contributions = "loads of parts" if is_part else "loads", dict[range, RoutedTokens](), []
    for rank in sorted(rank for ranks in groups for rank in ranks if reports(metric, dims.coordinates(rank), dims)):
        for index, microbatch in enumerate(microbatches_of_rank(recompute.layout, rank, recompute.subject.batch_rows)):
            if microbatch.contributes_gradients != is_extra:
                tokens = routed.get(microbatch.rows) or _route(located, layer, microbatch.rows)
                routed[microbatch.rows] = tokens
                loads = tokens.loads(rank, counts_all_rows=counts_all_rows)
                contributions.append(MicroBatchContribution(rank, index, loads, float(tokens.targets.sum())))
    return contributions


def loads_differ(e: MismatchEvidence) -> str:
    """Which tokens of which rows a sum of loads has."""
    layers = _layers(e, lambda each: each.layer.name)
    if not layers:
        return ""
    is_of_drops = torch.equal(e.value[:-1], e.expected[:-1])
    part, words = (slice(-1, None), "dropped assignments: ") if is_of_drops else (slice(0, -1), "")
    factors = dict(e.known_factors)
    subject = e.source.recompute.subject
    if isinstance(subject, JobVerificationSubject) and subject.job.memory.recompute != "none":
        factors[FORWARDS] = 2.0
    compared = replace(e, value=e.value[part], expected=e.expected[part], known_factors=factors)
    if text := is_scaled(compared):
        return words + text
    contributions = _contributions(e.source, layers[0])
    others = {
        "rows that ranks compute once more, since others have more of them, are counted again": contributions
        + _contributions(e.source, layers[0], is_extra=True),
        "rows without targets are counted, too": _contributions(e.source, layers[0], counts_all_rows=True),
    }
    for text, counted in others.items():
        if counted and torch.equal(_sum_values(counted)[part], compared.value):
            return words + text
    text = fit.explain_contributions(compared.value, [c._replace(value=c.value[part]) for c in contributions], None)
    return text and words + text


def _sum_values(contributions: Sequence[MicroBatchContribution]) -> Tensor:
    return torch.stack([each.value for each in contributions]).sum(0)


def correction_differs(e: MismatchEvidence) -> str:
    """Other loads by which a correction was moved, or loads that a rank keeps."""
    for layer in _layers(e, lambda each: f"{each.layer.router}.load"):
        kept = [c._replace(value=c.value[:-1]) for c in _contributions(e.source, layer)]
        return fit.explain_contributions(e.source.worst_pair.value, kept, e.rank)
    if not _layers(e, lambda each: each.correction):
        return ""
    moved = [(each, direction) for each in _layers(e) if (direction := _moved(e, each)) is not None]
    by_layer = [_contributions(e.source, each) for each, _ in moved]  # All layers, since signs of one show little
    for words, sign, counted in _other_loads(by_layer[0]):
        loads = [_sum_values([each[index] for index in counted])[:-1] for each in by_layer]
        directions = [sign * torch.sign(each.sum() - each.numel() * each) for each in loads]
        if all(torch.equal(direction, value) for direction, (_, value) in zip(directions, moved, strict=True)):
            return f"it was moved {words}{e.source.location_text()}"
    return ""


def _moved(e: MismatchEvidence, layer: BalancedLayer) -> Tensor | None:
    """The directions in which a rank has moved a correction; None if it does not have it."""
    records = e.source.records_by_key.get(TensorKey("buffer", layer.correction or ""), [])
    value = next((record.value for rank, record in records if rank == (e.rank or 0)), None)
    before = e.source.recompute.state_before_step.get(f"buffer/{layer.correction}")
    return None if value is None or before is None else ((value - before) / _settings(e).speed).double().round()


def _other_loads(contributions: Sequence[MicroBatchContribution]) -> Iterator[tuple[str, int, list[int]]]:
    """Words, a sign, and the indices of contributions."""
    yield "towards experts with more than the mean load", -1, [*range(len(contributions))]
    for field, noun in enumerate(("rank", "micro-batch")):
        for number in sorted({each[field] for each in contributions}):
            indices = [index for index, each in enumerate(contributions) if each[field] == number]
            yield f"by the loads of {noun} {number} alone", 1, indices


# --- terms of the loss ---------------------------------------------------------------------------------


def terms_differ(e: MismatchEvidence) -> str:
    """The gradient of logits with other terms than those of each row."""
    routed = _rows_of_worst(e, _layers(e, lambda each: _label(each, each.layer.output.logits)))
    if routed is None or (settings := _settings(e)).row_weight == settings.z_weight == 0:
        return ""
    settings_of = {
        ROW_LOSS: settings.model_copy(update={"weight": settings.row_weight, "z_weight": 0.0}),
        "the mean square of log-sum-exps": settings.model_copy(update={"weight": 0.0}),
    }
    right = None
    for words, counts, targets in _term_inputs(routed, e.rank):
        gradients = {
            name: routed.part(routed.term_gradient(each, counts, targets), e.rank).reshape(e.value.shape)
            for name, each in settings_of.items()
        }
        gradients = {name: gradient for name, gradient in gradients.items() if gradient.any()}
        if right is None:
            right, total = gradients, sum(gradients.values(), torch.zeros_like(e.value))
            shares = torch.zeros_like(total)  # Rounding errors of a sum of nothing are no sum of gradients
            if not fit.is_equal_up_to_rounding(e.expected - e.value, total):
                shares = e.value - e.expected + total
        for forms in (gradients, right | {name: g for name, g in gradients.items() if name == ROW_LOSS}):
            factors = fit.solve_coefficients(shares, [*forms.values()])
            if factors and (not words or words == SAME_WEIGHT or all(fit.is_about(each, 1) for each in factors)):
                return (words or _scaled_terms(e, [*forms], factors)) + e.source.location_text()
    return ""


ROW_LOSS = "the loss of each row"
SAME_WEIGHT = "the terms that balance experts count the same for each row, whatever its targets"


def _term_inputs(routed: RoutedTokens, rank: int | None) -> Iterator[tuple[str, Tensor, Tensor]]:
    """Counts and targets of terms, the right ones first."""
    rows, experts, targets = len(routed.rows), routed.layer.layer.count, routed.targets
    counts, part_counts = (
        row_counts(each, rows, experts) for each in (routed.chosen, routed.part(routed.chosen, rank))
    )
    yield "", counts, targets
    yield f"{ROW_LOSS} has the assignments of the tokens of one rank alone", part_counts, targets
    words = "the terms that balance experts are taken over the tokens of the micro-batch, not of each row"
    yield words, counts.sum(0, keepdim=True), targets.sum(0, keepdim=True)
    yield SAME_WEIGHT, counts, torch.ones_like(targets)


def _scaled_terms(e: MismatchEvidence, names: Sequence[str], factors: Sequence[float]) -> str:
    if fit.is_about(min(factors), max(factors)):
        names, factors = ["the terms that balance experts"], factors[:1]
    texts = []
    for name, factor in zip(names, factors, strict=True):
        if not fit.is_about(factor, 1):
            times = f"counts {fit.format_factor(factor)} times{fit.factor_meaning(factor, e.known_factors)}"
            texts.append(f"the gradient of {name} {times if factor else 'is missing'}")
    return "; ".join(texts)


def balance_loss_differs(e: MismatchEvidence) -> str:
    """The terms of some layers alone."""
    if e.name != BALANCE_LOSS or e.source.recompute.planned is None:
        return ""
    layers, count = _layers(e), sum(r.target_count for r in e.results)
    sums = torch.tensor([r.balance_terms for r in e.results], dtype=torch.float64).sum(0)
    stages = [e.source.recompute.planned.stage_of(TensorKey("activation", each.layer.router)) for each in layers]
    groups = [[at for at, other in enumerate(stages) if other == stage] for stage in sorted({n or 0 for n in stages})]
    for missing in [*([at] for at in range(len(layers))), *groups]:
        rest = sums.sum() - sums[missing].sum()
        if fit.is_equal_up_to_rounding(e.value * count, rest) and not fit.is_equal_up_to_rounding(rest, sums.sum()):
            return f"it leaves out the terms of {' and '.join(layers[at].layer.name for at in missing)}"
    return ""


EXPERT_HYPOTHESES: tuple[Hypothesis, ...] = (
    (("activation",), limit_differs),
    (("activation",), weights_are_corrected),
    (("activation gradient",), terms_differ),
    (("loads",), loads_differ),
    (("sum",), balance_loss_differs),
    (("buffer",), correction_differs),
)
