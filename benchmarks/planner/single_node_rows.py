"""Rows of `a100_single_node.csv`: iteration times of small GPT models on one host, with full recomputation."""

from planner.published_rows import measured_number

from motet.collectives.cost.published_curves import Row, count
from motet.models.settings import DecoderSettings
from motet.parallel.layout import layout_of_sizes
from motet.plan.frameworks import STACKS
from motet.plan.planned_step import PlannedStep
from motet.plan.validation.step_rows import MeasuredHardware, MeasuredStep
from motet.precision.recipe import RECIPES

COLUMNS = (
    "# GPUs",
    "global batch",
    "micro batch",
    "hidden size",
    "attention heads",
    "# layers",
    "sequence length",
    "tensor parallelism",
    "data parallelism",
    "pipeline parallelism",
    "iteration time (ms)",
)
_VOCABULARY = 51200  # GPT-2, padded as Megatron does for 8 ranks of tensor parallelism
_DEVICE = "A100-SXM4-80GB"


def measured_step(row: Row) -> MeasuredStep:
    """A row as a planned step with its measurements."""
    hidden, length = count(row, "hidden size"), count(row, "sequence length")
    model = DecoderSettings(
        vocab_size=_VOCABULARY,
        context=length,
        layers=count(row, "# layers"),
        hidden=hidden,
        heads=count(row, "attention heads"),
        ffn_hidden=4 * hidden,
        gated=False,
        activation="gelu_tanh",
        norm="layer",
        bias=True,
        positions="learned",
    )
    dp, batch = count(row, "data parallelism"), count(row, "global batch")
    layout = layout_of_sizes(
        dp=dp,
        tp=count(row, "tensor parallelism"),
        pp=count(row, "pipeline parallelism"),
        microbatches=max(1, batch // (dp * count(row, "micro batch"))),
    )
    step = PlannedStep(
        model, length, batch, layout, RECIPES["fp16"], "float16", STACKS["megatron-deepspeed"], recompute="full"
    )
    gpus, seconds = count(row, "# GPUs"), measured_number(row, "iteration time (ms)")
    return MeasuredStep(
        row["id"],
        "vTrain",
        f"gpt-{model.layers}",
        "A",
        MeasuredHardware(_DEVICE, gpus, gpus, None, None),
        step,
        seconds and seconds / 1e3,
        None,
        "outside",
        "ok",
    )
