"""A trained model on one device, without an optimizer: from a checkpoint of a run, or from a folder of Hugging Face.
Parameters are read in pieces into their memory, in the dtype that the job computes in."""

import json
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

import torch
from torch import Tensor

from motet.checkpoint.reader import CheckpointReader, open_checkpoint
from motet.core.direct_io import PIECE_BYTES
from motet.core.errors import InputError, check_input
from motet.core.text_files import parse_json
from motet.core.trace import log_if_slow, progress_if_slow
from motet.data.corpus.prepare import find_tokenizer
from motet.data.corpus.tokenizer import Tokenizer, load_tokenizer
from motet.models.build import TrainableModel, build_trainable_model
from motet.models.hf.hf_model import build_hf_model, max_context, open_hf_checkpoint
from motet.models.parameter_values import set_values
from motet.models.settings import DecoderSettings, UserModuleSettings
from motet.precision.numerics import precision_numerics
from motet.train.job import Job
from motet.train.launch.run_folder import job_of_checkpoint

Log = Callable[[str], None]


@dataclass(frozen=True)
class StoredLanguageModel:
    """A model that continues texts, and the tokenizer of its texts."""

    model: TrainableModel
    tokenizer: Tokenizer
    source: Path  # The checkpoint, or the folder
    numerics: Callable[[], AbstractContextManager[None]]  # A context that computes in the precision of the job
    step: int | None = None
    end_ids: tuple[int, ...] = ()  # Tokens besides the tokenizer's end that end a text


def open_language_model(
    path: Path, device: torch.device, log: Log, *, use_tokenizer: Callable[[Tokenizer, int | None], object]
) -> StoredLanguageModel:
    """The model of a run, of one checkpoint, or of a folder of Hugging Face. Before its weights are read,
    `use_tokenizer` gets the tokenizer and the context, to refuse texts that do not fit."""
    check_input(
        path.is_dir(), f"{path} is not a folder; give the folder of a run, a checkpoint, or a Hugging Face folder"
    )
    is_adapter = (path / "adapter_config.json").is_file() and not (path / "config.json").is_file()
    check_input(
        not is_adapter,
        f"{path} holds adapters of PEFT without their model; export the run with --adapters merge, or give the run",
    )
    if (path / "config.json").is_file() and not (path / "job.toml").is_file():
        return _open_folder(path, device, log, use_tokenizer=use_tokenizer)
    with open_checkpoint(path) as checkpoint:
        job = job_of_checkpoint(checkpoint.path)
        _check_continues_texts(job)
        with log_if_slow(log, "looking for the tokenizer of the run ..."):
            tokenizer = find_tokenizer(job.data, progress_if_slow(log)).tokenizer
        use_tokenizer(tokenizer, job.model.context if isinstance(job.model, DecoderSettings) else None)
        return _open_checkpoint(job, checkpoint, device, tokenizer=tokenizer, log=log)


def _check_continues_texts(job: Job) -> None:
    """Refuse a job whose model is not known to predict each next token, before anything is read."""
    model = job.model
    is_hf = isinstance(model, UserModuleSettings) and model.hf_path is not None
    kind = f"model.factory = {model.factory!r}" if isinstance(model, UserModuleSettings) else f"{model.family!r}"
    check_input(
        isinstance(model, DecoderSettings) or (is_hf and job.data.objective == "causal"),
        f"the model of job {job.name!r} ({kind}, data.objective = {job.data.objective!r}) is not known to predict the "
        "next token of a text; give a run of a decoder, or of a causal hf: model",
    )


def _open_checkpoint(
    job: Job, checkpoint: CheckpointReader, device: torch.device, *, tokenizer: Tokenizer, log: Log
) -> StoredLanguageModel:
    settings, dtype = job.model.without_stored_values(), getattr(torch, job.precision.resolved.compute)
    build = partial(build_trainable_model, settings, job.run.seed, dtype, device)
    with log_if_slow(log, "building the model ..."):
        try:
            model = build(on_meta=True)
        except InputError:
            raise
        except Exception:  # noqa: BLE001  # a model of transformers may need values to be built
            model = build()
    _fill(model, checkpoint, device, log=log)
    model = replace(model, initial_values=None)
    numerics = partial(precision_numerics, job.precision, device)
    ends = _configured_ends(model)
    return StoredLanguageModel(model, tokenizer, checkpoint.path, numerics, checkpoint.step, ends)


def _fill(model: TrainableModel, checkpoint: CheckpointReader, device: torch.device, *, log: Log) -> None:
    """Read parameters and buffers of the module. Only a piece of a few megabytes exists twice."""
    module, progress = model.module, progress_if_slow(log)
    tensors = [(name, p, ("master", "frozen")) for name, p in module.named_parameters()]
    stored = {name: b for name, b in module.named_buffers() if f"buffer/{name}" in checkpoint}
    tensors += [(name, buffer, ("buffer",)) for name, buffer in stored.items()]  # type: ignore[misc]  # also tensors
    total, done = sum(tensor.numel() for _, tensor, _ in tensors), 0
    for name, tensor, kinds in tensors:
        key = next((key for kind in kinds if (key := f"{kind}/{name}") in checkpoint), None)
        missing = (
            f"checkpoint {checkpoint.path} holds no parameter {name} of shape {list(tensor.shape)}, which the model"
        )
        check_input(
            key is not None and checkpoint.shape(key) == tuple(tensor.shape),
            f"{missing} of its job has; give the checkpoints of this job",
        )
        assert key is not None
        if tensor.is_meta and isinstance(tensor, torch.nn.Parameter):
            set_values(tensor, torch.empty(tensor.shape, dtype=tensor.dtype, device=device))
        _read_into(tensor.data, checkpoint, key)
        done += tensor.numel()
        progress(f"reading elements of {checkpoint.path.name}", done, total)
    module.requires_grad_(False)


def _read_into(target: Tensor, checkpoint: CheckpointReader, key: str) -> None:
    offsets, lengths = (0,) * target.ndim, tuple(target.shape)
    if not lengths:
        target.copy_(checkpoint.read_box(key, ((), ())))
        return
    row_bytes = max(1, checkpoint.tensor_bytes(key) // max(1, lengths[0]))
    step = max(1, 8 * PIECE_BYTES // row_bytes)
    for first in range(0, lengths[0], step):
        rows = min(step, lengths[0] - first)
        target[first : first + rows].copy_(checkpoint.read_box(key, ((first, *offsets[1:]), (rows, *lengths[1:]))))


def _open_folder(
    folder: Path, device: torch.device, log: Log, *, use_tokenizer: Callable[[Tokenizer, int | None], object]
) -> StoredLanguageModel:
    """A folder of Hugging Face, in the dtype of its config."""
    checkpoint = open_hf_checkpoint(str(folder), {})
    check_input(
        checkpoint.kind == "causal", f"{folder} holds a {checkpoint.kind} model; give one that predicts the next token"
    )
    check_input(checkpoint.weights_folder, f"{folder} holds no weights (model.safetensors); give a folder with some")
    tokenizer = load_tokenizer(str(folder))
    use_tokenizer(tokenizer, max_context(checkpoint))
    dtype = getattr(checkpoint.config, "dtype", None) or torch.float32
    before = torch.get_default_dtype()
    try:
        torch.set_default_dtype(dtype)
        with log_if_slow(log, f"reading the weights in {folder} ..."):
            module = build_hf_model(checkpoint).to(device)
    finally:
        torch.set_default_dtype(before)
    module.requires_grad_(False)

    def unused(batch: object) -> Tensor:
        raise AssertionError("transformers generates")

    model = TrainableModel(
        module=module,
        loss_sum=unused,
        logits=unused,
        vocab_size=None,
        num_classes=None,
        randomness=lambda step, rows: nullcontext(),
        context=max_context(checkpoint),
        is_autoregressive=True,
    )
    ends = (*_configured_ends(model), *_ends_of_file(folder / "generation_config.json"))
    return StoredLanguageModel(model, tokenizer, folder, nullcontext, end_ids=ends)


def _configured_ends(model: TrainableModel) -> tuple[int, ...]:
    return _as_ids(getattr(getattr(model.module, "config", None), "eos_token_id", None))


def _ends_of_file(path: Path) -> tuple[int, ...]:
    try:
        values = parse_json(path.read_text(encoding="utf-8")) if path.is_file() else {}
    except (OSError, json.JSONDecodeError, UnicodeDecodeError) as error:
        raise InputError(f"{path} is not valid JSON: {error}") from None
    return _as_ids(values.get("eos_token_id") if isinstance(values, dict) else None)


def _as_ids(value: object) -> tuple[int, ...]:
    ids = value if isinstance(value, list) else [value]
    return tuple(each for each in ids if isinstance(each, int))
