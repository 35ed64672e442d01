"""Hypotheses about masters and moments: what they were updated with."""

import math
from collections.abc import Sequence
from dataclasses import replace

from torch import Tensor

from motet.parity.compare.tensor_differences import relative_distance
from motet.parity.diagnose import linear_fit as fit
from motet.parity.diagnose.mismatch_evidence import MismatchEvidence, OptimizerEvidence
from motet.parity.diagnose.optimizer_update import ExpectedOptimizerUpdate, OptimizerUpdateTerm, weighted_sum
from motet.parity.diagnose.tensor_hypotheses import EXACT_HYPOTHESES, TENSOR_HYPOTHESES, explain

UPDATE_TOLERANCE = 1e-6  # Between changes of masters, which are small against the masters


def counts_other_steps(e: MismatchEvidence) -> str:
    return f"it counts {float(e.value):g} steps, where one device has {float(e.expected):g}" if e.name == "step" else ""


def update_differs(e: MismatchEvidence) -> str:
    o = e.optimizer
    if o is None:
        return ""
    update, change = o.update, e.value - o.update.base(o.state_name)
    for words, rate in update.alternative_rates.items():
        if rate != update.learning_rate and _is_result_of(e, o, replace(update, learning_rate=rate)):
            factor = rate / update.learning_rate if update.learning_rate else 0.0
            meaning = fit.factor_meaning(factor, e.known_factors)
            text = f", or with {fit.format_factor(factor)} times its own{meaning}" if meaning else ""
            return f"it was updated with the learning rate of {words}{text}"
    summands = update.summands(o.state_name)
    if text := explain_sum(change, summands, e):
        return text
    for words, alternative in update.alternatives():
        if _is_result_of(e, o, alternative):
            return f"it was updated {words}"
    for words, gradient in o.gradient.alternatives.items():
        if gradient.shape == update.gradient.shape and _is_result_of(e, o, replace(update, gradient=gradient)):
            return f"it was updated with a gradient that is {words}"
    if text := _epsilon_differs(e, o):
        return text
    others = o.other_gradients.items() if o.state_name in ("exp_avg", "momentum_buffer") else ()
    summands += [OptimizerUpdateTerm(words, gradient, 0.0) for words, gradient in others]
    return explain_sum(change, summands, e) or _implied_input_differs(e, o)


def _is_result_of(e: MismatchEvidence, o: OptimizerEvidence, alternative: ExpectedOptimizerUpdate) -> bool:
    base = o.update.base(o.state_name)
    change = alternative.expected_state()[o.state_name] - base
    tolerance = UPDATE_TOLERANCE if o.state_name == "master" else fit.FIT_TOLERANCE
    is_distinct = relative_distance(e.expected - base, change) > tolerance
    return is_distinct and relative_distance(e.value - base, change) < tolerance


def explain_sum(value: Tensor, summands: Sequence[OptimizerUpdateTerm], e: MismatchEvidence) -> str:
    """Name the terms that the sum has more or less often than it should."""
    present = [s for s in summands if s.expected_factor or float(s.value.abs().max())]
    fitted = fit.solve_coefficients(value, [s.value for s in present]) if value.numel() > len(present) else None
    if not fitted:
        return ""
    ratios = [f / s.expected_factor if s.expected_factor else None for s, f in zip(present, fitted, strict=True)]
    known = {round(ratio, 6) for ratio in ratios if ratio is not None}
    if len(present) > 1 and len(known) == 1 and None not in ratios and known != {1.0}:
        return f"all of it counts {_times(fitted[0] / present[0].expected_factor, e)}"
    texts, tolerance = [], fit.COEFFICIENT_TOLERANCE
    for (words, _, expected), factor, ratio in zip(present, fitted, ratios, strict=True):
        if abs(factor - expected) <= tolerance * max(abs(expected), tolerance):
            continue
        if ratio is None:
            texts.append(f"{words} is in it, {fit.format_factor(factor)} times, where it should not be")
        else:
            texts.append(f"{words} {'is missing' if fit.is_about(ratio, 0) else f'counts {_times(ratio, e)}'}")
    return "; ".join(texts)


def _times(factor: float, e: MismatchEvidence) -> str:
    return f"{fit.format_factor(factor)} times{fit.factor_meaning(factor, e.known_factors)}"


def _epsilon_differs(e: MismatchEvidence, o: OptimizerEvidence) -> str:
    """Solve for the number that AdamW adds to the root."""
    update = o.update
    if o.state_name != "master" or update.settings.name != "adamw":
        return ""
    mean, root = update.bias_corrected(update.expected_state())
    ratio = (update.master - e.value) / update.learning_rate - update.weight_decay * update.master
    epsilon = float((ratio * (mean - ratio * root)).sum() / ratio.square().sum())
    alternative = replace(update, settings=update.settings.model_copy(update={"eps": epsilon}))
    is_cause = math.isfinite(epsilon) and _is_result_of(e, o, alternative)
    return f"it was updated with eps = {epsilon:.4g}, not {update.settings.eps:g}" if is_cause else ""


def _implied_input_differs(e: MismatchEvidence, o: OptimizerEvidence) -> str:
    """Solve for the moment before the step, or for the gradient, and explain that."""
    if o.state_name == "master":
        return ""
    (_, moment, decay), *new_terms = o.update.summands(o.state_name)
    if decay:
        sources = {f"{name} before the step": tensor for name, tensor in o.state_before.items()}
        implied = (e.value - weighted_sum(new_terms)) / decay
        before = MismatchEvidence(implied, moment, e.rank, e.known_factors, source_tensors=sources)
        if text := explain(before, EXACT_HYPOTHESES):
            return f"what it was before the step is wrong: {text}"
    if o.state_name == "exp_avg_sq":
        return ""
    gradient = (e.value - decay * moment) / new_terms[0].expected_factor
    text = explain(replace(o.gradient, value=gradient, expected=o.update.gradient), TENSOR_HYPOTHESES)
    return text and f"the gradient that it was updated with is wrong: {text}"
