"""The FLOPs of a step, from the job alone."""

from dataclasses import replace

from motet.core.errors import InputError
from motet.data.settings import NUM_SENTINELS
from motet.models.arch.logit_slices import padded_targets
from motet.models.spec.layer_specs import MicroBatchShape
from motet.models.spec.model_spec import spec_from_settings
from motet.train.job import Job


def batch_shape(job: Job, rows: int) -> MicroBatchShape:
    """The sizes of a micro-batch of `rows` sequences, with the expected number of masked tokens."""
    data = job.data
    if data.objective == "spans":
        from motet.data.samples.span_corruption import span_corruption_lengths  # It needs numpy

        spans = span_corruption_lengths(data.sequence_length, data.mask_fraction, NUM_SENTINELS)
        return MicroBatchShape(rows, spans.target_tokens, spans.source_tokens)
    targets = round(rows * data.sequence_length * data.mask_fraction) if data.objective == "masked" else None
    return MicroBatchShape(rows, data.sequence_length, targets=targets)


def computed_shape(job: Job, rows: int) -> MicroBatchShape:
    """The same with as many rows as the masked head computes, which are padded."""
    shape = batch_shape(job, rows)
    return shape if shape.targets is None else replace(shape, targets=padded_targets(shape.targets))


def training_flops(job: Job) -> float | None:
    """FLOPs of forward and backward over the global batch, with half of the full attention if it is causal.
    None for a user's module and for a family of Hugging Face models with unknown sizes."""
    try:
        spec = spec_from_settings(job.model)
    except InputError:
        return None
    return float(spec.training_flops(batch_shape(job, job.data.batch_sequences)))
