"""The first tensor that differs, and what the reference knows that it could be made of."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace

import torch
from torch import Tensor

from motet.parity.compare.align_with_reference import TensorAlignmentError, TensorKey, align_tensor, reshape_to_rows
from motet.parity.compare.reference_runs import TRAJECTORY, ReferenceRuns
from motet.parity.compare.tensor_differences import ReferenceStep, compare_with_reference, group_by_key
from motet.parity.diagnose.contribution_hypotheses import MicroBatchContribution, explain_by_enumeration
from motet.parity.diagnose.linear_fit import is_equal_up_to_rounding
from motet.parity.diagnose.locate_difference import DifferenceLocator
from motet.parity.diagnose.mismatch_hypotheses import NOT_UPDATED, TensorMismatch, explain_mismatch
from motet.parity.diagnose.optimizer_hypotheses import ExpectedOptimizerUpdate, explain_update
from motet.parity.diagnose.scalar_hypotheses import (
    alternative_counts,
    alternative_losses,
    explain_loss,
    explain_norm,
    explain_scalar,
)
from motet.parity.diagnose.single_device_recompute import SingleDeviceRecompute
from motet.parity.layout_verdict import DifferenceAtStep, LayoutVerdict, find_differences, wrong_verdict
from motet.parity.record.tensor_recorder import RecordedTensor
from motet.parity.subjects.job_subject import TRAINING_MODE_CALLS
from motet.train.optimizer.sharded_optimizer import group_parameters


def find_likely_cause(
    recompute: SingleDeviceRecompute,
    records_by_rank: Sequence[Sequence[RecordedTensor]],
    step_difference: DifferenceAtStep,
) -> str:
    """A likely cause in words; empty where there is none."""
    key, reference = (
        step_difference.difference.key,
        recompute.reference_runs.reference_for(step_difference.phase, step_difference.step),
    )
    reference_tensor, records = reference.tensors.get(key), group_by_key(records_by_rank).get(key, [])
    if reference_tensor is None or not records or step_difference.difference.reason:
        return step_difference.difference.reason
    try:
        pairs = align_tensor(reference_tensor, records)
    except TensorAlignmentError as error:
        return str(error)
    explainer = DifferenceExplainer(recompute, records_by_rank, step_difference, reference, reference_tensor, pairs)
    return (
        explainer.explain_by_kind()
        or _explain_by_unsketched_tensor(recompute, records_by_rank, step_difference)
        or explainer.explain_unmatched()
    )


def _explain_by_unsketched_tensor(
    recompute: SingleDeviceRecompute,
    records_by_rank: Sequence[Sequence[RecordedTensor]],
    step_difference: DifferenceAtStep,
) -> str:
    """Of what was folded nobody can tell where its elements are: the next one of its kind may say."""
    reference, key = (
        recompute.reference_runs.reference_for(step_difference.phase, step_difference.step),
        step_difference.difference.key,
    )
    if not any(each.is_sketched for _, each in group_by_key(records_by_rank)[key]):
        return ""
    for other_difference in compare_with_reference(reference, records_by_rank):
        records = group_by_key(records_by_rank).get(other_difference.key, [])
        if (
            other_difference.key[0] != key[0]
            or other_difference.is_rounding
            or any(each.is_sketched for _, each in records)
        ):
            continue
        cause = find_likely_cause(recompute, records_by_rank, replace(step_difference, difference=other_difference))
        return f"as {other_difference.key[1]}: {cause}" if cause else ""
    return ""


def make_layout_verdict(
    layout: str,
    make_recompute: Callable[[int], SingleDeviceRecompute],
    reference_runs: ReferenceRuns,
    phases: Sequence[tuple[str, int]],
    read_records: Callable[[str, int], Sequence[Sequence[RecordedTensor]]],
) -> LayoutVerdict:
    """`what_if`: of a step. `walked`: phases and steps, in their order. `seen`: of these, what each rank has seen."""
    worst, first, noise_dominated = find_differences(reference_runs.reference_for, phases, read_records)
    if first is None:
        return LayoutVerdict(layout, True, worst.difference.relative_error, str(worst), noise_dominated=noise_dominated)
    return wrong_verdict(
        layout,
        worst,
        first,
        lambda: find_likely_cause(make_recompute(first.step), read_records(first.phase, first.step), first),
    )


class DifferenceExplainer(DifferenceLocator):
    """What it could be made of."""

    def explain_by_kind(self) -> str:
        kind, name = self.reference_tensor.key
        if kind in ("sum", "norm", "evaluation"):
            return self._explain_scalar(kind, name)
        if kind == "loss":
            records = group_by_key(self.records_by_rank).get(self.reference_tensor.key, [])
            return explain_loss(records, self.recompute.microbatch_results, self.known_factors, self._token_count)
        cause = self._explain_tensor(kind, name)
        return cause and f"{cause}{self._location_text()}"

    def explain_unmatched(self) -> str:
        """What is known if it is made of nothing that was tried."""
        cause = {
            "gradient": "no sum of what ranks and micro-batches have gives it: it was changed while it was summed, or "
            "after",
            "norm": "gradients are right, and no sum of their squares gives it: it has others in it, or was "
            "changed after",
            "random mask": "it is no mask of any of these rows and steps: drawn with another seed, or by a generator "
            "that goes on",
            "sample": self._explain_sample(),
        }.get(self.reference_tensor.key[0], "")
        return cause and f"{cause}{self._location_text()}"

    def _explain_sample(self) -> str:
        value, expected = self._worst_pair.value, self._worst_pair.expected
        differing_count = int((value != expected).sum()) if value.shape == expected.shape else value.numel()
        if differing_count < value.numel() / 2:
            return f"its rows are the right ones, but {differing_count} of their {value.numel()} numbers are others"
        return (
            f"it is of no row of the {len(self.recompute.reference_runs.step_references)} steps that were compared: rows are read in "
            "another order (another seed, say), or from another place"
        )

    def _explain_tensor(self, kind: str, name: str) -> str:
        if (kind, name) == ("state", "step"):
            value, expected = float(self._worst_pair.value), float(self._worst_pair.expected)
            return f"it counts {value:g} steps, where one device has {expected:g}"
        if kind == "clipped gradient":
            return self._explain_clipped_gradient(name)
        if kind == "starting parameter":
            return explain_mismatch(self._make_mismatch()) or self._explain_starting_parameter()
        if kind == "parameter" and (cause_text := explain_mismatch(self._make_mismatch())) == NOT_UPDATED:
            return f"{cause_text}{self._note_correct_master()}"
        if kind == "state" and "/" in name:
            return self._explain_optimizer_state(*name.split("/", 1)) or explain_mismatch(self._make_mismatch())
        if kind in ("activation", "activation gradient"):
            return (
                explain_mismatch(self._make_row_mismatch()) or self._explain_microbatching() or self._explain_buffer()
            )
        return explain_mismatch(
            self._make_row_mismatch() if kind in ("sample", "random mask") else self._make_mismatch()
        )

    def _explain_starting_parameter(self) -> str:
        if self.step_difference.phase == TRAJECTORY and self.step_difference.step == 0:
            return "its initial values are others than on one device"
        return "it is not what was stored before this step" if self.step_difference.phase != TRAJECTORY else ""

    def _note_correct_master(self) -> str:
        """The optimizer's is right, the model's is not."""
        master_key: TensorKey = ("state", f"master/{self.reference_tensor.key[1]}")
        master_difference = {
            each.key: each for each in compare_with_reference(self.reference, self.records_by_rank)
        }.get(master_key)
        return (
            ", though its master was: the model keeps the old"
            if master_difference is not None and master_difference.is_rounding
            else ""
        )

    def _explain_buffer(self) -> str:
        """A buffer that is another on the rank, too."""
        differences = [
            difference
            for difference in compare_with_reference(self.reference, self.records_by_rank)
            if not difference.is_rounding
        ]
        for each in differences:
            if each.key[0] == "buffer" and each.rank == self._worst_pair.rank:
                return f"on this rank buffer {each.key[1]} is another after the step, too"
        return ""

    def _make_mismatch(self) -> TensorMismatch:
        kind, name = self.reference_tensor.key
        region = self._differing_slice or slice(None)
        contributions = self._contributions(name, 1.0) if kind == "gradient" else []
        source_tensors = {
            f"{other[0]} {other[1]}": each.value
            for other, each in self.reference.tensors.items()
            if other[0] == kind and each.record.unsharded_shape is not None
        }
        value, expected = self._worst_pair.value, self._worst_pair.expected
        if self._worst_pair.record is not None and self._worst_pair.record.unsharded_shape is not None:
            value, expected = value[region], expected[region]
        part_rank = (
            self.step_difference.difference.rank
            if self._wrong_pairs and len(self._wrong_pairs) < len(self.pairs)
            else self._worst_pair.rank
        )
        previous_contributions = (
            self._contributions(name, 1.0, 1) if kind == "gradient" and self.step_difference.step else []
        )
        return TensorMismatch(
            value,
            expected,
            part_rank,
            self.known_factors,
            contributions,
            self._alternatives(),
            self._value_before_step(),
            source_tensors=source_tensors,
            previous_contributions=previous_contributions,
        )

    def _contributions(self, name: str, scale: float, steps_ago: int = 0) -> list[MicroBatchContribution]:
        recompute = replace(self.recompute, step=self.step_difference.step - steps_ago) if steps_ago else self.recompute
        return [
            MicroBatchContribution(
                c.rank, c.microbatch, scale * self._select_worst_shard(c.gradients[name]), c.target_count
            )
            for c in recompute.microbatch_results
            if name in c.gradients
        ]

    def _alternatives(self) -> dict[str, Tensor]:
        """Of the same kind and shape."""
        kind, name = self.reference_tensor.key
        alternatives = {}
        if kind == "gradient" and self.step_difference.step:
            previous_gradient = self.recompute.reference_runs.step_references[self.step_difference.step - 1].value_of(
                ("clipped gradient", name)
            )
            if previous_gradient is not None:
                alternatives["the clipped gradient of the step before"] = self._select_worst_shard(previous_gradient)
        for description, reference in self._other_steps().items():
            tensor = reference.value_of(self.reference_tensor.key)
            if kind not in ("state", "parameter", "buffer") and tensor is not None:
                alternatives[f"what it was in {description}"] = self._select_worst_shard(tensor)
        for other_key, other_tensor in self.reference.tensors.items():
            if (
                other_key[0] == kind
                and other_key != self.reference_tensor.key
                and other_tensor.value.shape == self.reference_tensor.value.shape
            ):
                alternatives[f"that of {other_key[1]}"] = self._select_worst_shard(other_tensor.value)
        return {words: tensor for words, tensor in alternatives.items() if tensor.ndim}

    def _other_steps(self) -> dict[str, ReferenceStep]:
        """The other ones, the nearest first."""
        this_step, all_steps = self.step_difference.step, self.recompute.reference_runs.step_references
        descriptions = {this_step - 1: "the step before", this_step + 1: "the step after"}
        order = sorted((n for n in range(len(all_steps)) if n != this_step), key=lambda n: abs(n - this_step + 0.1))
        return {descriptions.get(n, f"step {n + 1}"): all_steps[n] for n in order}

    def _value_before_step(self) -> Tensor | None:
        kind, name = self.reference_tensor.key
        key = {"parameter": f"master/{name}", "state": name, "buffer": f"buffer/{name}"}.get(kind, "")
        state_before = self.recompute.state_before_step.get(key)
        return None if state_before is None or state_before.ndim == 0 else self._select_worst_shard(state_before)

    def _make_row_mismatch(self) -> TensorMismatch:
        """Of a micro-batch: rows that it might have instead, of this step and of others, and as it would be if the
        parameters were those of the step before."""
        kind, name = self.reference_tensor.key
        record = self._worst_pair.record
        alternative_rows: dict[str, Tensor] = {}
        alternatives: dict[str, Tensor] = {}
        if record is not None and self._worst_pair.value.ndim == 2:
            tensors_by_step = {
                "the batch": self.reference.tensors,
                **{f"the batch of {w}": r.tensors for w, r in self._other_steps().items()},
            }
            for description, tensors in tensors_by_step.items():
                for key, reference_tensor in tensors.items():
                    if key[0] == kind and (key[1] == name or kind == "random mask"):
                        label = description if key[1] == name else f"{description}, {key[1]}"
                        alternative_rows |= self._as_rows({label: reference_tensor.value})
            if kind == "sample":
                other_samples = {
                    f"what {s[1]} should be": w.value for s, w in self.reference.tensors.items() if s[0] == kind
                }
                alternatives = self._as_rows(other_samples, record.rows)
                alternatives.pop(f"what {name} should be", None)
            elif kind != "random mask" and self.step_difference.step > 0:
                alternatives = self._as_rows(self._with_stale_parameters(), record.rows)
        worst_pair = self._worst_pair
        return TensorMismatch(
            worst_pair.value,
            worst_pair.expected,
            worst_pair.rank,
            self.known_factors,
            alternatives=alternatives,
            alternative_rows=alternative_rows,
        )

    def _as_rows(self, tensors: Mapping[str, Tensor], rows: Sequence[int] | None = None) -> dict[str, Tensor]:
        """[rows, numbers of each] of what has the shape of the tensor; some of the rows."""
        row_indices = [place for place, row in enumerate(self.reference_tensor.rows) if rows is None or row in rows]
        return {
            words: reshape_to_rows(tensor, 0, False, len(self.reference_tensor.rows))[row_indices]
            for words, tensor in tensors.items()
            if tensor.ndim
            and tensor.shape == self.reference_tensor.value.shape
            and tensor.shape[0] % len(self.reference_tensor.rows) == 0
        }

    def _with_stale_parameters(self) -> dict[str, Tensor]:
        """With parameters of the step before: all of them, or those of the module; or in backward alone, those of all
        or of a block that the module is in."""
        module = self.reference_tensor.key[1].partition("[")[0].partition(" (")[0]
        stale_text = "what parameters that are those of the step before give: they were used before they were updated"
        updated_here = {
            seen.name.removeprefix("master/"): slice(seen.start, seen.start + seen.numel)
            for seen in self.records_by_rank[self._worst_pair.rank or 0]
            if seen.kind == "state" and seen.name.startswith("master/")
        }
        except_updated_here = ", but for those that this rank updates itself"
        variants: list[tuple[str, str, dict[str, slice], bool]] = [
            (stale_text, "", {}, False),
            (f"{stale_text} (those of {module} alone)", f"{module}.", {}, False),
            (f"{stale_text}{except_updated_here}", "", updated_here, False),
        ]
        if self.reference_tensor.key[0] == "activation gradient":
            stale_backward_text = "what backward gives with parameters that are those of the step before"
            variants += [
                (f"{stale_backward_text}{except_updated_here * bool(fresh_slices)}", "", fresh_slices, True)
                for fresh_slices in ({}, updated_here)
            ]
            blocks = [module[:place] for place, letter in enumerate(module) if letter == "."]
            variants += [
                (f"{stale_backward_text} (those of {block} alone)", f"{block}.", {}, True) for block in reversed(blocks)
            ]
        stale_tensors = {}
        for description, prefix, kept, backward_only in variants:
            stale_tensor = self.recompute.run_with_stale_parameters(
                self.step_difference.step - 1, prefix, kept, backward_only
            ).get(self.reference_tensor.key)
            if stale_tensor is not None:
                stale_tensors[description] = stale_tensor.value
        return stale_tensors

    def _explain_microbatching(self) -> str:
        """One device that cuts the batch in the same way has it, too."""
        record = self._worst_pair.record
        if record is None:
            return ""
        for same_cut_record in self.recompute.records_with_same_microbatches.get(self.reference_tensor.key, []):
            if (
                same_cut_record.rows == record.rows
                and same_cut_record.value.shape == record.value.shape
                and is_equal_up_to_rounding(record.value, same_cut_record.value)
            ):
                return (
                    "its rows depend on the other rows of their micro-batch, or on how many there are (statistics over "
                    "the batch, say, or numbers that are drawn for all at once): one device that cuts the batch in the "
                    "same way has the same"
                )
        return ""

    # --- gradients and updates -----------------------------------------------------------------

    def _explain_clipped_gradient(self, name: str) -> str:
        mismatch = self._make_mismatch()
        summed = sum(share.value for share in self._contributions(name, 1.0))
        alternatives = dict(mismatch.alternatives)
        if isinstance(summed, Tensor) and summed.numel():
            mean = summed / self._target_count
            alternatives = {
                "the gradient before clipping": mean,
                "the sum, not divided or clipped": summed,
                **alternatives,
            }
            alternatives |= self._wrong_clippings(mean)
        contributions = self._contributions(name, self._gradient_scale)
        return explain_mismatch(
            TensorMismatch(
                mismatch.value,
                mismatch.expected,
                mismatch.rank,
                self.known_factors,
                contributions,
                alternatives,
                source_tensors=mismatch.source_tensors,
            )
        )

    def _wrong_clippings(self, mean: Tensor) -> dict[str, Tensor]:
        """Of a gradient, by something else than the norm of all gradients."""
        limit, norm = self.recompute.subject.optimizer.clip_norm, _gradient_norm(self.reference)
        if limit is None:
            return {}
        norms = {
            "clipped by its own norm, instead of that of all gradients": float(torch.linalg.vector_norm(mean)),
            "clipped twice": norm * max(1.0, norm / limit),
            "clipped by the square of the norm": norm**2,
            "clipped by the norm of the sums, not divided": norm * self._target_count,
            **{f"clipped by the norm of {words}": _gradient_norm(each) for words, each in self._other_steps().items()},
        }
        clipped = {words: mean * (limit / own) for words, own in norms.items() if own > limit}
        return clipped | {"cut element by element, instead of by the norm": mean.clamp(-limit, limit)}

    def _explain_optimizer_state(self, state_name: str, name: str) -> str:
        """Of a moment or a master."""
        reference = self.reference
        gradient = reference.value_of(("clipped gradient", name))
        state_before = self.recompute.state_before_step
        if (
            gradient is None
            or f"master/{name}" not in state_before
            or (self._worst_pair.record and self._worst_pair.record.is_sketched)
        ):
            return ""
        settings = self.recompute.subject.optimizer
        parameters_by_name = {n: p for n, p in self.recompute.module.named_parameters() if p.requires_grad}
        groups = group_parameters(parameters_by_name, settings)
        scale, decay = next(key for key, members in groups.items() if name in members)
        master = self._select_worst_shard(state_before[f"master/{name}"])
        own_state = {
            n.split("/")[0]: self._select_worst_shard(other_gradient)
            for n, other_gradient in state_before.items()
            if n.endswith(f"/{name}")
        }
        moments = {n: own_state.get(n, torch.zeros_like(master)) for n in ("exp_avg", "exp_avg_sq", "momentum_buffer")}
        update = ExpectedOptimizerUpdate(
            settings, reference.learning_rate * scale, decay, float(state_before.get("step", torch.zeros(()))) + 1,
            master, moments, self._select_worst_shard(gradient),
            {description: other_step.learning_rate * scale for description, other_step in self._other_steps().items()}
            | {f"parameters whose scale is {other:g}": reference.learning_rate * other for other, _ in groups},
        )  # fmt: skip
        mismatch = self._make_mismatch()
        source_tensors = {
            f"{n} before the step": t
            for n, t in state_before.items()
            if n.startswith(f"{state_name}/") or n.endswith(name)
        }
        mismatch = TensorMismatch(
            mismatch.value,
            mismatch.expected,
            mismatch.rank,
            self.known_factors,
            value_before_step=self._value_before_step(),
            source_tensors=source_tensors,
        )
        contributions = self._contributions(name, self._gradient_scale)
        summed = sum(share.value for share in contributions)
        alternatives = {}
        for words, each in self._other_steps().items():
            if (t := each.value_of(("clipped gradient", name))) is not None:
                alternatives[f"that of {words}"] = self._select_worst_shard(t)
        if isinstance(summed, Tensor):
            alternatives["the one before clipping"] = summed / self._gradient_scale / self._target_count
            alternatives["the sum, not divided or clipped"] = summed / self._gradient_scale
        gradient_mismatch = TensorMismatch(
            mismatch.value, mismatch.expected, mismatch.rank, self.known_factors, contributions, alternatives
        )
        return explain_update(mismatch, update, state_name, gradient_mismatch, self._other_gradients(name))

    def _other_gradients(self, name: str) -> dict[str, Tensor]:
        """Gradients of some other parameters of this shape."""
        same_shape = [
            (other, each.value)
            for (kind, other), each in self.reference.tensors.items()
            if kind == "clipped gradient" and other != name and each.value.shape == self.reference_tensor.value.shape
        ]
        return {f"the gradient of {other}": self._select_worst_shard(value) for other, value in same_shape[:8]}

    @property
    def _target_count(self) -> float:
        count = self.reference.value_of(("sum", "target tokens"))
        return 1.0 if count is None else float(count) or 1.0

    @property
    def _token_count(self) -> int:
        """Of the batch, targets or not."""
        tokens = self.reference.value_of(("sample", "targets"))
        return 0 if tokens is None else tokens.numel()

    # --- numbers -------------------------------------------------------------------------------

    def _explain_scalar(self, kind: str, name: str) -> str:
        value, expected = float(self._worst_pair.value), float(self._worst_pair.expected)
        computed = self.recompute.microbatch_results
        if name == TRAINING_MODE_CALLS:
            return (
                f"{value:g} calls are made in the state of training, where the model is judged{self._location_text()}"
            )
        if kind == "norm":
            cause_text = explain_norm(value, expected, self.records_by_rank, self._target_count, self.known_factors)
        else:
            evaluated = self.recompute.evaluation_results if kind == "evaluation" else computed
            contributions = [
                MicroBatchContribution(c.rank, c.microbatch, c.loss_sum, c.target_count) for c in evaluated
            ]
            if name in MEAN_OF_COUNT:
                alternatives = alternative_counts(evaluated, 0 if kind == "evaluation" else self._token_count)
                cause_text = explain_scalar(value, expected, alternatives, self.known_factors) or self._explain_count(
                    name, contributions
                )
            else:
                cause_text = explain_scalar(
                    value, expected, alternative_losses(evaluated), self.known_factors, contributions
                )
        return cause_text and f"{cause_text}{self._location_text()}"

    def _explain_count(self, name: str, contributions: Sequence[MicroBatchContribution]) -> str:
        """Whose targets are in a count: those whose losses are in the sum. Counts alone are small numbers."""
        records = self.records_by_rank[self._worst_pair.rank or 0]
        mean = next((each.value for each in records if each.name == MEAN_OF_COUNT[name]), None)
        return (
            explain_by_enumeration(mean * self._worst_pair.value, contributions, "the share of ")
            if mean is not None
            else ""
        )


MEAN_OF_COUNT = {"target tokens": "mean loss", "evaluation targets": "evaluation loss"}  # And the mean over as many


def _gradient_norm(reference: ReferenceStep) -> float:
    norm = reference.value_of(("norm", "gradient norm"))
    return 0.0 if norm is None else float(norm)
