"""The job that a command names: a TOML file, a built-in job, or one that trains the model of a Hugging Face config."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from motet.core.errors import InputError
from motet.models.hf.hf_config import read_config, settings_from_config
from motet.models.settings import EncoderDecoderSettings, EncoderSettings
from motet.train.job import Job, load_job, overridden_job

if TYPE_CHECKING:
    from motet.models.spec.model_spec import ModelSpec

_CONTEXT_KEYS = ("max_position_embeddings", "n_positions", "max_seq_len", "seq_length")
_DEFAULT_CONTEXT = 2048  # Where a config names none


def is_config(source: str) -> bool:
    """Whether a word of the command line names a config and not a job."""
    path = source.removeprefix("hf:")
    return source.startswith("hf:") or path.endswith(".json") or Path(path).is_dir()


def load_job_or_config(source: str, overrides: list[str]) -> Job:
    """Load a job, or make one in bf16 that trains the model of a config with its usual objective."""
    if not is_config(source):
        return load_job(source, overrides)
    path = source.removeprefix("hf:")
    objective, context = _objective_and_context(read_config(path))
    tree: dict[str, Any] = {
        "name": "config",
        "model": {"family": "module", "factory": f"hf:{path}"},
        "data": {"objective": objective, "sequence_length": context},
        "precision": {"recipe": "bf16"},
        "run": {"steps": 1},
    }
    return overridden_job(tree, overrides, source)


def _objective_and_context(config: dict[str, Any]) -> tuple[str, int]:
    try:
        settings = settings_from_config(config)
    except InputError:  # Of a family whose sizes are not known, or wrong, which the reader of its sizes says
        lengths = (config.get(key) for key in _CONTEXT_KEYS)
        context = next((length for length in lengths if isinstance(length, int) and length > 0), _DEFAULT_CONTEXT)
        return ("spans" if config.get("is_encoder_decoder") else "causal"), context
    if isinstance(settings, EncoderSettings):
        return settings.head, settings.context
    return ("spans" if isinstance(settings, EncoderDecoderSettings) else "causal"), settings.context


def trace_job(job: Job) -> ModelSpec:
    """The spec of a job's model, whatever it is. This needs torch."""
    from motet.models.trace.model_trace import trace_model

    return trace_model(job.model, job.precision.resolved.compute, objective=job.data.objective)
