"""A small job of the same structure: it keeps every kind of block, and the ratios that matter to a layout."""

from pathlib import Path
from typing import Any

from motet.core.errors import InputError
from motet.models.hf.hf_config import read_config
from motet.models.settings import TransformerSettings, UserModuleSettings
from motet.models.spec.shrink import SmallSizes
from motet.train.job import Job, job_from_tree

MAX_LAYERS, MAX_TOKENS = 2, 32
LARGEST_OWN_SIZE = 16_000_000  # Parameters of a module that is verified at its own size
DEGREE = 4  # Ranks that divide a small size if and only if they divide the large one
SMALL_BUCKET_MIB = 0.5  # A small model then has several buckets, too
HF_PREFIX = "hf:"
# The last step has this fraction of the learning rate; with 0 it would show no mistake of the optimizer.
MIN_FINAL_LR_FRACTION = 0.1
DROPPED_SETTINGS = {
    "run": ("epochs", "stop_at", "folder", "existing", "restarts"),
    "communication": ("compress_gradients", "compress_parameters", "compress_over", "compress_after", "error_feedback"),
}


def make_small_job(
    job: Job, rows: int, steps: int, *, max_tokens: int = MAX_TOKENS, blocks: int = MAX_LAYERS, degree: int = DEGREE
) -> Job:
    """The job with a small model and `steps` steps of `rows` rows; `blocks` are kept, if the model has as many.

    Ranks up to `degree` divide its sizes as they divide those of the job.
    """
    tree, tokens = job.model_dump(mode="json", exclude_unset=True), min(job.data.sequence_length, max_tokens)
    replacements: dict[str, dict[str, Any]] = {
        "model": _small_model(
            job, tokens, SmallSizes(blocks=max(blocks, MAX_LAYERS), degree=degree, window=tokens // 2)
        ),
        "data": {"sequence_length": tokens, "batch_sequences": rows},
        "run": {"steps": steps, "ranks": 1, "threads": 1},
        "communication": {
            "bucket_mib": min(job.communication.bucket_mib, SMALL_BUCKET_MIB),
            "first_bucket_mib": min(job.communication.first_bucket_mib, SMALL_BUCKET_MIB / 4),
        },
    }
    if job.optimizer.schedule.final_fraction < MIN_FINAL_LR_FRACTION:
        schedule = tree.get("optimizer", {}).get("schedule", {})
        replacements["optimizer"] = {"schedule": {**schedule, "final_fraction": MIN_FINAL_LR_FRACTION}}
    small = {
        section: _without(tree.get(section, {}), DROPPED_SETTINGS.get(section, ())) | new
        for section, new in replacements.items()
    }
    fixed = {"precision": {"recipe": "fp64"}, "checkpoint": {"keep": 1000}, "monitor": {"evaluate_batches": 3}}
    return job_from_tree({"name": job.name} | _without(tree, ("layout", "outer")) | small | fixed, job.name)


def _without(tree: dict[str, Any], names: tuple[str, ...]) -> dict[str, Any]:
    return {name: value for name, value in tree.items() if name not in names}


def _small_model(job: Job, tokens: int, sizes: SmallSizes) -> dict[str, Any]:
    model = job.model
    if isinstance(model, TransformerSettings):
        return sizes.shrink_settings(model) | {"context": min(model.context, 2 * tokens)}
    assert isinstance(model, UserModuleSettings)
    if not model.factory.startswith(HF_PREFIX):
        return _smaller_arguments(model, sizes)
    path = model.factory.removeprefix(HF_PREFIX)
    config = {**read_config(Path(path).expanduser()), **model.arguments}
    file = path if path.endswith(".json") else f"{path.rstrip('/')}/config.json"  # The stored weights do not fit
    return {"factory": f"{HF_PREFIX}{file}", "arguments": {**model.arguments, **sizes.shrink_config(config)}}


def _smaller_arguments(model: UserModuleSettings, sizes: SmallSizes) -> dict[str, Any]:
    """Smaller sizes among the arguments of the function of a large model, if it makes a smaller one of them."""
    from motet.models.user_module import default_arguments  # needs torch

    arguments = sizes.shrink_config({**default_arguments(model.factory), **model.arguments})
    smaller = model.model_copy(update={"arguments": {**model.arguments, **arguments}})
    try:
        large, small = (_parameters(each) for each in (model, smaller))
    except InputError:  # The function needs values, or these sizes do not fit
        return {}
    return {"arguments": smaller.arguments} if small < large > LARGEST_OWN_SIZE else {}


def _parameters(model: UserModuleSettings) -> int:
    import torch

    from motet.models.trace.model_trace import build_on_meta  # needs torch

    return sum(parameter.numel() for parameter in build_on_meta(model, torch.float32).module.parameters())
