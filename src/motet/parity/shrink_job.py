"""A small job of the same structure: it keeps every kind of block, and the ratios that matter to a layout.

A small vocabulary in place of a large one, and data that fit it.

The cost of a vocabulary grows with its entries, and hardly any mistake of a layout needs many of them.
`full_vocabulary` looks for the mistakes that do, in the head alone.
"""

from collections.abc import Collection
from dataclasses import dataclass
from math import lcm
from pathlib import Path
from typing import Any

from motet.core.errors import InputError
from motet.data.corpus.prepare import resolve_source
from motet.data.corpus.token_store import read_corpus_manifest
from motet.data.corpus.tokenizer import bpe_vocab_size
from motet.data.settings import DataSettings, DataSourceSettings
from motet.models.hf.hf_config import read_config
from motet.models.settings import ModelSettings, TransformerSettings, UserModuleSettings
from motet.models.spec.shrink import SmallSizes
from motet.train.job import Job, job_from_tree
from motet.train.launch.entry_points import LogFunction

MAX_LAYERS, MAX_TOKENS = 2, 32
LARGEST_OWN_SIZE = 16_000_000  # A module with at most this many parameters is verified at its full size
DEGREE = 4  # Ranks that divide a small size if and only if they divide the large one
SMALL_BUCKET_MIB = 0.5  # A small model then has several buckets, too
HF_PREFIX = "hf:"
# The last step has this fraction of the learning rate; with 0 it would show no mistake of the optimizer.
MIN_FINAL_LR_FRACTION = 0.1
DROPPED_SETTINGS = {
    "run": ("epochs", "stop_at", "folder", "existing", "restarts", "compile"),
    "memory": ("update",),
    "communication": ("compress_gradients", "compress_parameters", "compress_over", "compress_after", "error_feedback"),
}


def make_small_job(
    job: Job, rows: int, steps: int, *, max_tokens: int = MAX_TOKENS, blocks: int = MAX_LAYERS, degree: int = DEGREE
) -> Job:
    """The job with a small model and `steps` steps of `rows` rows; `blocks` are kept, if the model has as many.

    Ranks up to `degree` divide its sizes as they divide those of the job.
    """
    job = job.model_copy(update={"model": job.model.without_stored_values()})
    tree, tokens = job.model_dump(mode="json", exclude_unset=True), min(job.data.sequence_length, max_tokens)
    replacements: dict[str, dict[str, Any]] = {
        "model": _small_model(
            job, tokens, SmallSizes(blocks=max(blocks, MAX_LAYERS), degree=degree, window=tokens // 2)
        ),
        "data": {"sequence_length": tokens, "batch_sequences": rows},
        "run": {"steps": steps, "ranks": 1, "threads": 1},
        "memory": {},
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


KEPT_ENTRIES = 8192  # A job with at most this many is verified with its vocabulary
SMALL_ENTRIES = 512  # Fewest entries: 256 bytes, all special tokens and some merges
TEXT_BYTES = 64 << 20  # Largest corpus that is tokenised again; a larger one would take longer than all the rest
SMALL_TEXT, SMALL_CLASSIFICATION = "stdlib", "synthetic:majority"
ENTRIES_KEY = "vocab_size"


@dataclass(frozen=True)
class SmallVocabularyJob:
    """A job, with a small vocabulary if its own was large."""

    job: Job
    full_entries: int | None = None  # Entries of the large vocabulary; None: it was small
    degree: int = DEGREE  # Same as in `make_small_job`


def with_small_vocabulary(job: Job, tensor_ranks: Collection[int], log: LogFunction) -> SmallVocabularyJob:
    """The job with few entries, which these numbers of ranks split with as much padding as those of the job."""
    degree = lcm(DEGREE, *tensor_ranks)
    arguments, entries = _entry_arguments(job.model), vocabulary_entries(job)
    if entries is None or entries <= KEPT_ENTRIES:
        return SmallVocabularyJob(job)
    model = _with_few_entries(job.model, arguments, SmallSizes(degree=degree, entries=SMALL_ENTRIES))
    small = _entry_arguments(model)[ENTRIES_KEY]
    if small == entries:
        return SmallVocabularyJob(job)
    data = _small_data(job.data, small)
    sources = " and ".join(dict.fromkeys(each.source for each in data.sources()))
    log(f"the small job reads {sources} with a vocabulary of {small:,} entries in place of {entries:,}")
    return SmallVocabularyJob(job.model_copy(update={"model": model, "data": data}), entries, degree)


def vocabulary_entries(job: Job) -> int | None:
    """The entries of the job's vocabulary; None if its settings do not state their number."""
    entries = _entry_arguments(job.model).get(ENTRIES_KEY)
    return entries if type(entries) is int else None


def _entry_arguments(model: ModelSettings) -> dict[str, Any]:
    """The settings, values of a config or arguments of a function that have the number of entries."""
    if isinstance(model, TransformerSettings):
        return {ENTRIES_KEY: model.vocab_size}
    assert isinstance(model, UserModuleSettings)
    return {**(read_config(Path(model.hf_path).expanduser()) if model.hf_path else {}), **model.arguments}


def _with_few_entries(model: ModelSettings, arguments: dict[str, Any], sizes: SmallSizes) -> ModelSettings:
    if isinstance(model, TransformerSettings):
        model = model.without_stored_values()
        return model.model_copy(update={ENTRIES_KEY: sizes.shrink_settings(model).get(ENTRIES_KEY, model.vocab_size)})
    assert isinstance(model, UserModuleSettings)
    model = model.without_stored_values()
    small = sizes.shrink_entries(arguments) if model.hf_path is None else sizes.shrink_config(arguments)
    changed = {name: value for name, value in small.items() if name == ENTRIES_KEY or name.endswith("_token_id")}
    update: dict[str, Any] = {"arguments": {**model.arguments, **changed}}
    if model.vocab_size is not None:
        update[ENTRIES_KEY] = changed.get(ENTRIES_KEY, model.vocab_size)
    return model.model_copy(update=update)


def _small_data(data: DataSettings, entries: int) -> DataSettings:
    """Data whose tokens are below `entries`: of the same sources, or of other text where these are tokens or large."""
    has_few_tokens = data.tokenizer == "bytes" or (bpe_vocab_size(data.tokenizer, 0) or entries + 1) <= entries
    sources = dict[str, DataSourceSettings]()
    for source in data.sources():
        small = source if _is_kept(source, data, entries, has_few_tokens=has_few_tokens) else _replacement(source, data)
        same = sources.get(small.source)
        sources[small.source] = small.model_copy(update={"weight": same.weight + small.weight}) if same else small
    update: dict[str, Any] = {}
    if data.mixture:
        update["mixture"] = tuple(sources.values())
    elif data.source not in sources:
        (update["source"],) = sources
    if any(name.startswith("synthetic:") for name in sources):
        update["tokenizer"] = "bytes"
    elif not has_few_tokens:
        update["tokenizer"] = f"bpe:{entries}"
    return data.model_copy(update=update)


def _is_kept(source: DataSourceSettings, data: DataSettings, entries: int, *, has_few_tokens: bool) -> bool:
    resolved = resolve_source(source, data)
    if resolved.corpus is not None:
        return has_few_tokens or resolved.corpus.size <= TEXT_BYTES
    if resolved.kind == "built":
        return read_corpus_manifest(Path(resolved.location)).vocab_size <= entries
    return has_few_tokens or resolved.kind == "synthetic"


def _replacement(source: DataSourceSettings, data: DataSettings) -> DataSourceSettings:
    name = SMALL_CLASSIFICATION if data.objective == "classify" else SMALL_TEXT
    return DataSourceSettings(source=name, weight=source.weight)
