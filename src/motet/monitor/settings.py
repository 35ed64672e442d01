"""The `[monitor]` section: the reports of a run, and their places."""

from typing import Annotated, ClassVar, Literal

from pydantic import Field

from motet.core.config_loading import FrozenSettings


class MonitorSettings(FrozenSettings):
    """`events.jsonl` is always written; these choose the rest."""

    other_names: ClassVar = {
        "every": "log*",
        "evaluate_every": "eval_*",
        "wandb": "report_to *wandb",
        "profile_from": "profile profiler* profiling",
    }
    every: Annotated[int, Field(ge=1)] = 1
    """Report every n-th step; the first, the last and any failing step are always reported."""
    spans: bool = True
    """Record the spans of each reported step in events.jsonl."""
    tensorboard: bool = True
    wandb: Literal["off", "online", "offline"] = "off"
    """Weights & Biases; `offline` needs no network, and `wandb sync` sends it later."""
    wandb_project: str = "motet"
    replica_check_every: Annotated[int, Field(ge=1)] | None = None
    """Steps between replica checks of numbers that must be equal on ranks or must add up; never when not given."""
    replica_check_action: Literal["stop", "warn"] = "stop"
    """The action if the check fails: end the run with a sentence, or warn and continue."""
    numerics_every: Annotated[int, Field(ge=0)] = 0
    """Steps between measurements of the values that underflow and overflow in 16 bits, by tensor; 0: never."""
    predict: bool = True
    """Show the planner's prediction of step time and memory next to the measurement, at the end of the run."""
    profile_from: Annotated[int, Field(ge=1)] | None = None
    """First step of a torch.profiler window; the trace is written to the run folder."""
    profile_steps: Annotated[int, Field(ge=1)] = 3
    evaluate_every: Annotated[int, Field(ge=1)] | None = None
    """Steps between evaluations on the validation split; only at the end when not given."""
    evaluate_batches: Annotated[int, Field(ge=1)] = 8
    """Batches per evaluation (fewer when the split is smaller)."""
    sample_tokens: Annotated[int, Field(ge=0)] = 0
    """Tokens of text to sample from the model at the end of the run."""
    sample_prompt: str = ""
    sample_temperature: Annotated[float, Field(ge=0)] = 0.8
    """0 always takes the most likely token."""
