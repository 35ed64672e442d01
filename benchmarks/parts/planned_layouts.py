"""Twenty layouts of three models, whose steps are predicted and measured; and a fourth model, for calibration alone."""

from dataclasses import dataclass

_COMMON = (
    "data.source=stdlib",
    "data.restart_documents=false",
    "checkpoint.every=1000000",
    "monitor.evaluate_every=1000000",
    "monitor.sample_tokens=0",
    "monitor.spans=false",
    "monitor.tensorboard=false",
    "run.device=cpu",
)

# Settings of the job `tiny`, which is a Llama-like decoder of 4 blocks.
MODELS = {
    "tiny": ("data.batch_sequences=8",),
    "encoder": (
        'model={family="encoder", vocab_size=4096, context=128, layers=6, hidden=192, heads=6, ffn_hidden=768}',
        "data.objective=masked",
        "data.sequence_length=128",
        "data.batch_sequences=16",
    ),
    "llama": (
        "model.hidden=384",
        "model.layers=6",
        "model.heads=6",
        "model.kv_heads=2",
        "model.ffn_hidden=1024",
        "model.tied=false",
        "model.context=128",
        "data.sequence_length=128",
        "data.batch_sequences=8",
    ),
}
CALIBRATION_MODEL = (
    "model.hidden=320",
    "model.layers=3",
    "model.heads=5",
    "model.kv_heads=5",
    "model.ffn_hidden=960",
    'model.activation="gelu"',
    "model.context=192",
    "data.sequence_length=192",
    "data.batch_sequences=8",
)


def stack_variants() -> list[list[str]]:
    """Settings of one-rank jobs of the fourth model, which differ in the kernels that take the time of a step."""
    base = [*_COMMON, *CALIBRATION_MODEL, "run.ranks=1"]
    changes = (
        [],
        ["model.layers=1"],
        ["data.batch_sequences=2"],
        ["model.vocab_size=16384"],
        ["model.layers=1", "data.batch_sequences=2"],
        ["layout.microbatches=8"],
        ["data.batch_sequences=32", "layout.microbatches=32"],
        ["model.layers=6", "model.hidden=128", "model.heads=4", "model.kv_heads=4", "model.ffn_hidden=256"],
        ['model.activation="silu"', "model.gated=false", 'model.norm="layer"', "layout.microbatches=4"],
    )
    return [[*base, *change] for change in changes]


@dataclass(frozen=True)
class PlannedCase:
    """A layout of a model on a number of ranks."""

    model: str
    ranks: int
    layout: str = ""  # In the grammar of `[layout]`, with `recompute`

    @property
    def name(self) -> str:
        return " ".join(filter(None, [self.model, f"{self.ranks} rank{'s' * (self.ranks > 1)}", self.layout]))

    def settings(self) -> list[str]:
        """The overrides of the job `tiny`."""
        words = [word.partition("=") for word in self.layout.split()]
        layout = [f"memory.{key}={value}" if key == "recompute" else f"layout.{key}={value}" for key, _, value in words]
        return [*_COMMON, *MODELS[self.model], f"run.ranks={self.ranks}", *layout]


CASES = (
    PlannedCase("tiny", 1),
    PlannedCase("encoder", 1, "microbatches=4"),
    PlannedCase("llama", 1, "recompute=selective"),
    PlannedCase("encoder", 1, "microbatches=2 recompute=full"),
    PlannedCase("tiny", 2),
    PlannedCase("llama", 2, "zero=1"),
    PlannedCase("encoder", 2, "zero=2 microbatches=2"),
    PlannedCase("llama", 2, "zero=3"),
    PlannedCase("tiny", 2, "zero=3 recompute=full"),
    PlannedCase("tiny", 2, "tp=2"),
    PlannedCase("encoder", 2, "tp=2 sp=true microbatches=2"),
    PlannedCase("llama", 2, "pp=2 microbatches=4"),
    PlannedCase("encoder", 2, "pp=2 schedule=gpipe microbatches=4"),
    PlannedCase("tiny", 2, "pp=2 chunks=2 schedule=interleaved microbatches=4"),
    PlannedCase("llama", 4, "zero=1"),
    PlannedCase("encoder", 4, "zero=2 shard_group=2"),
    PlannedCase("tiny", 4, "zero=3 shard_group=2"),
    PlannedCase("llama", 4, "tp=2 zero=1"),
    PlannedCase("tiny", 4, "pp=4 microbatches=8"),
    PlannedCase("tiny", 4, "pp=2 tp=2 microbatches=4"),
)
