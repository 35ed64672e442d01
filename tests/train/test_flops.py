"""The inputs of a step by the job's objective, and its FLOPs."""

import motet
from motet.data.samples.packing import span_corruption_lengths
from motet.models.spec.layer_specs import MicroBatchShape
from motet.models.spec.model_spec import spec_from_settings
from motet.train.job import batch_shape, job_from_tree, training_flops


def test_inputs_and_flops_follow_the_objective() -> None:
    job = motet.load_job("tiny")
    assert batch_shape(job, 3) == MicroBatchShape(rows=3, length=256)
    assert training_flops(job) == spec_from_settings(job.model).training_flops(MicroBatchShape(16, 256))
    job = motet.load_job("bert-tiny", ["data.mask_fraction=0.25"])
    assert batch_shape(job, 2) == MicroBatchShape(rows=2, length=128, targets=64)
    values = ["data.objective=spans", "data.sequence_length=64", "data.mask_fraction=0.2"]
    job, spans = motet.load_job("tiny", values), span_corruption_lengths(64, 0.2, 100)
    assert batch_shape(job, 2) == MicroBatchShape(2, spans.target_tokens, spans.source_tokens)
    tree = motet.load_job("tiny").model_dump(mode="json")
    tree["model"] = {"family": "module", "factory": "package.module:function"}
    assert training_flops(job_from_tree(tree)) is None
