"""Models of transformers, from a folder or a config.json on this machine: built, loaded exactly, and called.
A folder's safetensors weights are loaded if it has any; a config.json, or a folder without weights, gives random
weights from the seed. Nothing is downloaded.

Packed rows unpacked into one row per document, padded at the end, for models that cannot separate documents.
"""

import inspect
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import Any, Literal, cast

import torch
from safetensors import SafetensorError
from torch import Tensor, nn

from motet.core.batch import Batch
from motet.core.config_loading import did_you_mean
from motet.core.errors import InputError, check_input
from motet.models.arch.attention_core import attention_exchange
from motet.models.arch.attention_marker import mask_marker
from motet.models.arch.attention_mask import AttentionMask, bidirectional_mask, causal_mask
from motet.models.arch.loss import gather_whole_logits
from motet.models.hf.hf_config import dropout_settings, read_config
from motet.models.layout_invariant_dropout import has_dropout
from motet.models.user_module import check_sequence_length, extract_logits


def logits_by_document(batch: Batch, call: Callable[[dict[str, Any]], Tensor], has_encoder: bool) -> Tensor:
    """The logits of packed rows, from a `call` of the model with one document per row.
    Rows are cut where the document changes; a source belongs to the document of the same row and number."""
    assert batch.documents is not None
    bounds = _document_bounds(batch.documents)
    indices, mask = _token_indices(bounds)
    tokens = batch.tokens.flatten()[indices]
    inputs = {"input_ids": tokens, "attention_mask": mask.long()}
    if has_encoder and batch.source is not None and batch.source_documents is not None:
        source_bounds = _document_bounds(batch.source_documents)
        source_indices, source_mask = _token_indices(source_bounds)
        sources = {key: index for index, key in enumerate(_rows_and_numbers(batch.source_documents, source_bounds))}
        # Padding may belong to a document without a source: it has weight 0, and takes any.
        order = [sources.get(key, 0) for key in _rows_and_numbers(batch.documents, bounds)]
        source = batch.source.flatten()[source_indices][order]
        inputs = {"input_ids": source, "attention_mask": source_mask[order].long(), "decoder_input_ids": tokens}
    return call(inputs)[mask].view(*batch.tokens.shape, -1)


def _document_bounds(documents: Tensor) -> Tensor:
    """The index, in the flattened rows, of each document's first token, and the number of all tokens."""
    starts = torch.ones_like(documents, dtype=torch.bool)
    starts[:, 1:] = documents[:, 1:] != documents[:, :-1]
    end = torch.tensor([documents.numel()], device=documents.device)
    return torch.cat([starts.flatten().nonzero().flatten(), end])


def _token_indices(bounds: Tensor) -> tuple[Tensor, Tensor]:
    """[documents, length]: the index of each token in the flattened rows, and whether it is a token or padding."""
    firsts, lengths = bounds[:-1].unsqueeze(1), bounds.diff()
    offsets = torch.arange(int(lengths.max()), device=bounds.device)
    mask = offsets < lengths.unsqueeze(1)
    return (firsts + offsets).where(mask, firsts), mask


def _rows_and_numbers(documents: Tensor, bounds: Tensor) -> list[tuple[int, int]]:
    """The row and the number of each document."""
    firsts = bounds[:-1]
    rows = firsts // documents.shape[1]
    return list(zip(rows.tolist(), documents.flatten()[firsts].tolist(), strict=True))


# --- a try with few tokens ----------------------------------------------------------------------------------

_PROBE_LENGTHS = (3, 4, 2)


def separates_documents(
    module: nn.Module, single: Callable[[Batch], Tensor], packed: Callable[[Batch], Tensor], *, vocab_size: int | None
) -> bool:
    """Whether `packed` gives documents of one row the logits that `single` gives each of them, tried on few tokens."""
    device, was_training = next(module.parameters()).device, module.training
    tokens = torch.arange(2, 2 + 2 * sum(_PROBE_LENGTHS), device=device).split(sum(_PROBE_LENGTHS))
    if vocab_size is not None:  # an index out of range would be fatal on a GPU
        tokens = tuple(part % vocab_size for part in tokens)
    numbers = torch.arange(len(_PROBE_LENGTHS), device=device)
    documents = numbers.repeat_interleave(torch.tensor(_PROBE_LENGTHS, device=device)).unsqueeze(0)
    positions = torch.cat([torch.arange(length, device=device) for length in _PROBE_LENGTHS]).unsqueeze(0)
    targets, sources = tokens[0].unsqueeze(0), tokens[1].unsqueeze(0)
    row = Batch(targets, targets, targets, numbers[:1], positions, documents, sources, documents)
    parts = zip(targets.split(_PROBE_LENGTHS, 1), sources.split(_PROBE_LENGTHS, 1), strict=True)
    try:
        with torch.no_grad(), torch.random.fork_rng(devices=[]):
            module.eval()
            expected = torch.cat([single(Batch(t, t, t, numbers[:1], source=s)) for t, s in parts], 1)
            logits = gather_whole_logits(packed(row), module)
            expected = gather_whole_logits(expected, module)
    except (RuntimeError, ValueError, TypeError, IndexError, InputError):
        return False  # the model does not take these arguments
    finally:
        module.train(was_training)
    largest = expected.abs().max().item()
    return logits.shape == expected.shape and (logits - expected).abs().max().item() <= 1e-4 * largest


ModelKind = Literal["causal", "masked", "classify", "encoder-decoder"]

_KIND_BY_CLASS_SUFFIX: dict[str, ModelKind] = {
    "ForCausalLM": "causal",
    "LMHeadModel": "causal",
    "ForMaskedLM": "masked",
    "ForSequenceClassification": "classify",
    "ForConditionalGeneration": "encoder-decoder",
}
_AUTO_CLASS: dict[ModelKind, str] = {
    "causal": "AutoModelForCausalLM",
    "masked": "AutoModelForMaskedLM",
    "classify": "AutoModelForSequenceClassification",
    "encoder-decoder": "AutoModelForSeq2SeqLM",
}


@dataclass(frozen=True)
class HuggingFaceCheckpoint:
    """The config that `hf:` names, and its folder of weights if there are any."""

    config: Any
    kind: ModelKind
    weights_folder: Path | None


def open_hf_checkpoint(folder_or_file: str, arguments: dict[str, Any]) -> HuggingFaceCheckpoint:
    """Read a folder or the path of a config.json; `arguments` replace values of the config."""
    path = Path(folder_or_file).expanduser()
    file_values = read_config(path)
    values = {**file_values, **arguments}
    mapping = _import_transformers().models.auto.configuration_auto.CONFIG_MAPPING
    model_type = values.get("model_type")
    if model_type not in mapping:
        hint = did_you_mean(str(model_type), mapping) or "a custom model needs a function as model.factory"
        raise InputError(f"{path}: model_type = {model_type!r} is not known to transformers; {hint}")
    wrong_type = import_module("huggingface_hub.errors").StrictDataclassError
    try:
        with silence_transformers():
            config = mapping[model_type].from_dict(values)
    except (TypeError, ValueError, ArithmeticError, wrong_type) as error:
        raise InputError(f"{path}: transformers rejects this config: {' '.join(str(error).split())}") from None
    _check_argument_names({name: value for name, value in arguments.items() if name not in file_values}, config)
    return HuggingFaceCheckpoint(config, _model_kind(config), path if path.is_dir() and _has_weights(path) else None)


def build_hf_model(checkpoint: HuggingFaceCheckpoint, *, load_weights: bool = True) -> nn.Module:
    """The module with the weights of the checkpoint, or with random ones from torch's generator."""
    auto = getattr(_import_transformers(), _AUTO_CLASS[checkpoint.kind])
    folder = checkpoint.weights_folder if load_weights else None
    dtype = torch.get_default_dtype()
    with silence_transformers():
        try:
            if folder is None:
                return cast(nn.Module, auto.from_config(checkpoint.config, dtype=dtype))
            module, report = auto.from_pretrained(
                folder,
                config=checkpoint.config,
                dtype=dtype,
                local_files_only=True,
                use_safetensors=True,
                ignore_mismatched_sizes=True,
                output_loading_info=True,
            )
        except SafetensorError as error:
            raise InputError(f"the weights in {folder} are damaged ({error}); copy them again") from None
        except (OSError, ValueError, AttributeError, LookupError, TypeError) as error:
            raise InputError(f"transformers cannot make this model: {type(error).__name__}: {error}") from None
    _check_all_weights_loaded(report, folder)
    return cast(nn.Module, module)


def make_logits_function(
    module: nn.Module, checkpoint: HuggingFaceCheckpoint
) -> tuple[Callable[[Batch], Tensor], Callable[[], int], Callable[[int], None]]:
    """The logits of a batch, whose positions and documents become arguments of transformers.

    The second function finds out, on few tokens, how the module separates documents. Call it before the first, or call
    the third with its result on another rank.
    """
    accepted, config = _accepted_names(module, checkpoint), checkpoint.config
    has_encoder, context = checkpoint.kind == "encoder-decoder", max_context(checkpoint)
    vocab_size = getattr(config, "vocab_size", None)
    inputs = _seq2seq_inputs if has_encoder else _single_stack_inputs

    def call(values: dict[str, Any]) -> Tensor:
        values = {"use_cache": False, **values}
        output = module(**{name: value for name, value in values.items() if name in accepted and value is not None})
        return extract_logits(output, module)

    def in_packed_rows(batch: Batch) -> Tensor:
        return call(inputs(module, checkpoint, batch))

    def one_by_one(batch: Batch) -> Tensor:
        dropout = ", ".join(dropout_settings(config.to_dict()))
        check_input(
            not (module.training and has_dropout(module, config.to_dict())),
            f"a {config.model_type} computes packed documents one by one, where dropout cannot follow rows: "
            f"set {dropout} = 0 (model.arguments) or data.restart_documents = false",
        )
        return logits_by_document(batch, call, has_encoder)

    why_whole = _why_whole_rows(module, checkpoint)
    ways = [one_by_one] if why_whole else [in_packed_rows, one_by_one]
    ways = [] if checkpoint.kind == "classify" else ways
    with_documents: Callable[[Batch], Tensor] | None = None

    def check_on_tokens() -> int:
        _check_is_causal(module, checkpoint)
        separate = (separates_documents(module, in_packed_rows, way, vocab_size=vocab_size) for way in ways)
        set_way(way := next((index for index, separates in enumerate(separate) if separates), len(ways)))
        return way

    def set_way(way: int) -> None:
        nonlocal with_documents
        with_documents = ways[way] if way < len(ways) else None

    def logits(batch: Batch) -> Tensor:
        if context is not None:
            check_sequence_length(batch.tokens, context, "model.arguments.max_position_embeddings")
        _check_part(batch, checkpoint, why_whole, takes_places=with_documents is in_packed_rows and not has_encoder)
        if batch.documents is None:
            return in_packed_rows(batch)
        if with_documents is None:
            remedy = "set data.restart_documents = false"
            raise InputError(f"a {config.model_type} does not separate packed documents; {remedy}")
        return with_documents(batch)

    return logits, check_on_tokens, set_way


def _accepted_names(module: nn.Module, checkpoint: HuggingFaceCheckpoint) -> set[str]:
    """The arguments that a module takes. Its cache may be an argument of an inner module: recomputation would append
    to a cache again."""
    parameters = inspect.signature(module.forward).parameters
    passes_on = any(each.kind is each.VAR_KEYWORD for each in parameters.values())
    return {*parameters, *(["use_cache"] if passes_on and getattr(checkpoint.config, "use_cache", False) else [])}


def _check_part(batch: Batch, checkpoint: HuggingFaceCheckpoint, why_whole: str, *, takes_places: bool) -> None:
    """Refuse a part of each row for a model that does not take the places of tokens."""
    is_encoder_decoder = checkpoint.kind == "encoder-decoder"
    reason = "it is an encoder-decoder" if is_encoder_decoder else why_whole or "no mask separates its documents"
    problem = f"a {checkpoint.config.model_type} computes whole rows only ({reason})"
    check_input(takes_places or attention_exchange.get() is None, problem)
    problem += f", and got {batch.tokens.shape[1]} tokens of each; give it whole rows"
    check_input(takes_places or batch.places is None, problem)


def max_context(checkpoint: HuggingFaceCheckpoint) -> int | None:
    """The longest sequence, where the model has one."""
    context = getattr(checkpoint.config, "max_position_embeddings", None)
    return context if isinstance(context, int) and context > 0 else None


# --- from a batch to arguments ---------------------------------------------------------------------


def _single_stack_inputs(module: nn.Module, checkpoint: HuggingFaceCheckpoint, batch: Batch) -> dict[str, Any]:
    mask, config, documents = None, checkpoint.config, batch.documents
    is_causal = checkpoint.kind == "causal" or getattr(config, "is_decoder", False)
    dtype = next(module.parameters()).dtype
    if attention_exchange.get() is not None:
        mask = mask_marker(causal=is_causal, device=batch.tokens.device)
    # Without a mask, a model takes a gap in the positions for the start of another document.
    elif is_causal and not (documents is None and batch.places is None):
        mask = _causal_masks(config, batch, dtype=dtype)
    elif documents is not None:
        mask = _dense(bidirectional_mask(documents, documents), batch.tokens, batch.tokens, dtype=dtype)
    positions = batch.positions
    if positions is None and batch.places is not None:
        positions = batch.places.expand_as(batch.tokens)
    return {"input_ids": batch.tokens, "position_ids": positions, "attention_mask": mask}


def _why_whole_rows(module: nn.Module, checkpoint: HuggingFaceCheckpoint) -> str:
    """Why neither a mask [R, 1, T, T] and positions that restart separate documents of one row, nor a part of a row can
    be computed: states that pass from token to token, ALiBi, or positions of the model's own. Empty if they can."""
    config, accepted = checkpoint.config, inspect.signature(module.forward).parameters.keys()
    if checkpoint.kind == "encoder-decoder":  # Positions as differences need no restart
        is_relative = hasattr(config, "relative_attention_num_buckets")
        return "" if is_relative else "its positions are absolute, and not an argument"
    kinds = set(getattr(config, "layer_types", None) or ()) - _LAYER_TYPES
    reasons = {
        "it takes no position_ids": "position_ids" not in accepted,
        "it takes no attention_mask": "attention_mask" not in accepted,
        "it has ALiBi": bool(getattr(config, "alibi", False)),
        f"it has layers of the kind {', '.join(sorted(kinds))}": bool(kinds),
        "it has convolutions over tokens": any(isinstance(layer, nn.Conv1d) for layer in module.modules()),
    }
    return next((reason for reason, holds in reasons.items() if holds), "")


_LAYER_TYPES = {"full_attention", "sliding_attention"}


def _causal_masks(config: Any, batch: Batch, *, dtype: torch.dtype) -> Any:
    """A mask, or one for each kind of layer."""
    windows = {"full_attention": None, "sliding_attention": getattr(config, "sliding_window", None)}
    kinds = set(getattr(config, "layer_types", None) or ["sliding_attention"])
    values = {kind: causal_mask(batch.documents, batch.places, windows[kind]) for kind in kinds}
    masks = {kind: _dense(mask, batch.tokens, batch.tokens, dtype=dtype) for kind, mask in values.items()}
    return masks if len(masks) > 1 else masks.popitem()[1]


def _dense(mask: AttentionMask, queries: Tensor, keys: Tensor, *, dtype: torch.dtype) -> Tensor | None:
    return mask.dense(queries.shape[1], keys.shape[1], dtype=dtype, device=queries.device)


def _seq2seq_inputs(module: nn.Module, checkpoint: HuggingFaceCheckpoint, batch: Batch) -> dict[str, Any]:
    source, sources, documents = batch.source, batch.source_documents, batch.documents
    no_source = f"a {checkpoint.config.model_type} reads a source besides its tokens; set data.objective = 'spans'"
    check_input(source is not None, no_source)
    if documents is None or sources is None:
        return {"input_ids": source, "decoder_input_ids": batch.tokens}
    dtype = next(module.parameters()).dtype
    encoder: Any = module.get_encoder()  # type: ignore[operator]  # a method of every such model
    encoder_mask = _dense(bidirectional_mask(sources, sources), sources, sources, dtype=dtype)
    return {
        # The encoder runs by itself: the model would give one mask to it and to the cross attention.
        "encoder_outputs": encoder(input_ids=source, attention_mask=encoder_mask),
        "attention_mask": _dense(bidirectional_mask(documents, sources), documents, sources, dtype=dtype),
        "decoder_attention_mask": _dense(causal_mask(documents), documents, documents, dtype=dtype),
        "decoder_input_ids": batch.tokens,
    }


# --- checks ----------------------------------------------------------------------------------------


def _check_is_causal(module: nn.Module, checkpoint: HuggingFaceCheckpoint) -> None:
    """Refuse an encoder in place of a decoder; where the config leaves a doubt, by the effect of a later token."""
    if checkpoint.kind != "causal" or getattr(module.config, "is_decoder", True):
        return
    tokens = torch.ones(2, 2, dtype=torch.long, device=next(module.parameters()).device)
    tokens[1, 1] = 2
    was_training = module.training
    with torch.no_grad():
        logits = extract_logits(module.eval()(input_ids=tokens, use_cache=False), module)
        first, second = gather_whole_logits(logits[:, 0], module)
    module.train(was_training)
    check_input(
        torch.allclose(first, second, rtol=1e-4, atol=1e-6),
        f"{type(module).__name__} with is_decoder = false sees the tokens that it should predict; set "
        "model.arguments.is_decoder = true, or name a *ForMaskedLM in architectures",
    )


def _import_transformers() -> Any:
    try:
        return import_module("transformers")
    except ImportError:
        raise InputError(
            "model.factory = 'hf:...' needs transformers; install it with: pip install motet[hf]"
        ) from None


@contextmanager
def silence_transformers() -> Iterator[None]:
    """Hide the warnings of transformers; the important ones are checks here."""
    logging = _import_transformers().utils.logging
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield


def _model_kind(config: Any) -> ModelKind:
    """The kind by the config's architecture, else by the usual task of its model type."""
    names = list(config.architectures or ())
    kinds = [kind for name in names for ending, kind in _KIND_BY_CLASS_SUFFIX.items() if name.endswith(ending)]
    if kinds:
        return kinds[0]
    known = ", ".join(f"*{ending}" for ending in _KIND_BY_CLASS_SUFFIX)
    check_input(not names, f"config.json: architectures = {names}: only {known} can be trained")
    if config.is_encoder_decoder:
        return "encoder-decoder"
    masked_models = _import_transformers().models.auto.modeling_auto.MODEL_FOR_MASKED_LM_MAPPING_NAMES
    return "masked" if config.model_type in masked_models and not getattr(config, "is_decoder", False) else "causal"


def _check_argument_names(arguments: dict[str, Any], config: Any) -> None:
    valid = {*type(config)().to_dict(), *config.attribute_map, "num_labels"}  # the last is kept as id2label
    for name in arguments:
        if name not in valid:
            known = [key for key in (*config.to_dict(), *config.attribute_map) if key not in arguments]
            problem = f"model.arguments: a {config.model_type} has no {name!r}"
            raise InputError("; ".join(filter(None, [problem, did_you_mean(name, known)])))


def _has_weights(folder: Path) -> bool:
    has_weights = any((folder / f"model.safetensors{ending}").is_file() for ending in ("", ".index.json"))
    pickled = sorted(file.name for file in folder.glob("pytorch_model*.bin*"))
    if pickled and not has_weights:
        raise InputError(
            f"{folder} has its weights in {pickled[0]}, which is a pickle; save them as safetensors, "
            f"or give {folder / 'config.json'} for random weights"
        )
    return has_weights


def _check_all_weights_loaded(report: dict[str, Any], folder: Path) -> None:
    names_by_problem = {
        "are missing": sorted(report["missing_keys"]),
        "are not part of this model": sorted(report["unexpected_keys"]),
        "do not fit": [f"{name} {list(a)} for {list(b)}" for name, a, b in sorted(report["mismatched_keys"])],
    }
    problems = [
        ", ".join(names[:3]) + f" and {len(names) - 3} more" * (len(names) > 3) + f" {problem}"
        for problem, names in names_by_problem.items()
        if names
    ]
    check_input(not problems, f"the weights in {folder} are not those of its config: {'; '.join(problems)}")
