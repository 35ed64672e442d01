"""Right pipelines are not called wrong, and all that is known of them is compared."""

import os

import pytest

from motet.parity.candidate_layouts import make_candidate
from motet.parity.layout_verdict import LayoutVerdict
from motet.parity.verify_job import make_verification_plans, verify_job_layouts
from motet.train.job import load_job
from parity.run_planted import reference, verified
from ranks import Ranks

DROPOUT = ("model.dropout=0.1",)
DEEP = ("model.layers=4", *DROPOUT)
MODELS = {
    "decoder": ("decoder", DROPOUT),
    "untied": ("decoder", ("model.tied=false", "model.vocab_size=261")),
    "split head": ("decoder", ("model.tied=false", "model.vocab_size=264")),
    "deep": ("decoder", DEEP),
    **{name: (name, ()) for name in ("bert", "t5", "llama", "gpt2", "qwen2", "classify", "adapters", "recomputed")},
}
LAYOUTS = [f"pp=2 dp=2 zero={zero} microbatches=3" for zero in range(4)]
CHUNKED = [f"pp=2 chunks=2 schedule={name} microbatches=4" for name in ("interleaved", "zb-v", "dualpipe-v")]
QUICK = "decoder", "pp=2 microbatches=4"
CASES = [
    QUICK,
    ("decoder", "pp=2 dp=2 zero=1 microbatches=3"),
    *((model, "pp=2 microbatches=4") for model in MODELS),
    *(("decoder", layout) for layout in (*LAYOUTS, "pp=2 microbatches=1", "pp=2 microbatches=4 schedule=gpipe")),
    *((model, "pp=2 tp=2 microbatches=3") for model in ("decoder", "untied", "split head", "llama", "t5")),
    *(("decoder", f"pp=2 tp=2 sp=true microbatches=3 zero={zero}") for zero in (0, 3)),
    *(("deep", layout) for layout in (*CHUNKED, "pp=4 microbatches=4", "pp=2 stages=0-0,1-3 microbatches=2")),
    *(("t5", layout) for layout in ("pp=4 microbatches=4", "pp=2 dp=2 zero=3 microbatches=3", CHUNKED[0])),
]


@pytest.mark.parametrize(
    ("model", "layout"),
    [pytest.param(*case, marks=() if case == QUICK else pytest.mark.proof) for case in dict.fromkeys(CASES)],
)
def test_a_right_pipeline_is_not_called_wrong(ranks: Ranks, model: str, layout: str) -> None:
    verdict = verified(ranks, reference(*MODELS[model]), layout)
    assert verdict.ok, verdict
    assert 0 < verdict.worst_relative < 1e-12


def test_a_small_job_has_blocks_and_rows_for_a_pipeline() -> None:
    for layout, blocks, microbatches in (
        ("pp=2", 2, 4),
        ("pp=2 chunks=3", 6, 4),
        ("pp=2 dp=3 microbatches=5", 2, 15),
        ("pp=2 stages=0-2,3-7", 8, 4),
    ):
        (plan,) = make_verification_plans(load_job("tiny", ["model.layers=8"]), [layout], print)
        candidate = make_candidate(plan.job, layout)
        assert plan.job.model.layers == blocks
        assert candidate.microbatches == microbatches and plan.job.data.batch_sequences % microbatches == 0


@pytest.mark.proof  # Each starts ranks and trains in three precisions
@pytest.mark.parametrize("recipe", ["bf16", "fp16"])
@pytest.mark.parametrize("layout", ["pp=2", "pp=2 chunks=2 schedule=zb-v", "dp=2 zero=2"])
def test_tied_weights_and_loss_scales_in_16_bits_are_not_called_wrong(recipe: str, layout: str) -> None:
    (plan,) = make_verification_plans(load_job("tiny", [f"precision.recipe={recipe}"]), [layout], print)
    verdicts = list[LayoutVerdict]()
    verify_job_layouts(plan, dict(os.environ), log=print, on_verdict=verdicts.append)
    assert [verdict.ok for verdict in verdicts] == [True], verdicts


def test_steps_in_float16_are_compared_with_a_scale_that_does_not_overflow() -> None:
    for setting, expected in (("precision.loss_scale=dynamic", 2048), ("precision.loss_scale=64", 64)):
        (plan,) = make_verification_plans(load_job("tiny", ["precision.recipe=fp16", setting]), ["dp=2"], print)
        scaler = plan.native_job.precision.make_loss_scaler()
        assert plan.native_job.precision.recipe == "fp16" and scaler is not None and scaler.scale == expected
