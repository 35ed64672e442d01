"""Everything that must be done before the first sample: find or train the tokenizer, build what is not in the cache.

Any number of processes may call `prepare` at once; one does the work and the others wait for it and find it done.
"""

import hashlib
import json
import os
import shutil
from dataclasses import dataclass
from pathlib import Path

import filelock

from motet.core.errors import InputError
from motet.data.corpus.bpe_training import TrainingText, bpe_vocab_size, train_bpe
from motet.data.corpus.build import CorpusBuildSpec, ProgressCallback, build_corpus, check_output_folder
from motet.data.corpus.discover import CorpusFiles, discover_corpus
from motet.data.corpus.megatron import find_megatron_prefix
from motet.data.corpus.prepared_data import CorpusKind, PreparedCorpus, PreparedData
from motet.data.corpus.token_store import (
    CorpusManifest,
    find_damage,
    is_built_corpus,
    read_corpus_manifest,
    report_write_errors,
)
from motet.data.corpus.tokenizer import NUM_SENTINELS, Tokenizer, load_tokenizer
from motet.data.samples.dataset import open_mixture_dataset, open_token_store
from motet.data.samples.synthetic import NUM_CLASSES, check_synthetic_source
from motet.data.settings import DataSettings, DataSourceSettings

# Bytes up to which the content of a built folder is checked at each start, not only its sizes (about 1 GB/s).
_MAX_CHECKSUM_BYTES = 256 << 20


@dataclass(frozen=True)
class ResolvedSource:
    """A source, and what it turned out to be."""

    fields: DataSourceSettings
    kind: CorpusKind
    location: str
    corpus: CorpusFiles | None = None  # The documents, where they are still to be tokenised


def prepare_data(settings: DataSettings, progress: ProgressCallback | None = None) -> PreparedData:
    """The data of a job, built into the cache where it is not there yet."""
    report_progress = progress or (lambda what, done, total: None)
    sources = [resolve_source(source, settings) for source in settings.sources()]
    cache = Path(settings.cache or "~/.cache/motet").expanduser()
    tokenizer_spec, tokenizer, sentinels = _resolve_tokenizer(settings, sources, cache, report_progress)
    corpora, classes = [], 0
    for source in sources:
        location, kind = source.location, source.kind
        if source.corpus is not None:
            build_spec = CorpusBuildSpec(
                source.corpus, source.fields, settings.objective == "classify", tokenizer, sentinels
            )
            location = str(_cached_corpus_folder(build_spec, cache, num_workers(settings), report_progress))
        corpus, num_classes = _describe_corpus(kind, location, source.fields.weight)
        corpora.append(corpus)
        classes = max(classes, num_classes)
    train_samples = open_mixture_dataset(tuple(corpora), settings, tokenizer, seed=0).count("train")
    return PreparedData(tuple(corpora), tokenizer_spec, sentinels, tokenizer.vocab_size, classes, train_samples)


def build_corpus_folder(
    fields: DataSourceSettings, settings: DataSettings, out: Path, progress: ProgressCallback
) -> CorpusManifest:
    """Build one source of text into a folder of the user's choice."""
    check_output_folder(out)
    source = resolve_source(fields, settings)
    if source.corpus is None:
        raise InputError(f"data source {fields.source!r} holds no text to build from: it is {source.kind} already")
    labelled = settings.objective == "classify"
    tokenizer, sentinels = tokenizer_from_settings(settings, [(source.corpus, fields, labelled)], progress)
    check_tokenizer_for_objective(tokenizer, settings)
    return build_corpus(
        CorpusBuildSpec(source.corpus, fields, labelled, tokenizer, sentinels), out, num_workers(settings), progress
    )


def _describe_corpus(kind: CorpusKind, location: str, weight: float) -> tuple[PreparedCorpus, int]:
    """A corpus that is ready to be read, and its classes."""
    if kind == "synthetic":
        return PreparedCorpus(kind, location, weight, "", 0, 0), NUM_CLASSES
    store = open_token_store(kind, location)
    size = (len(store.documents), int(store.first_token[-1]))
    return PreparedCorpus(kind, location, weight, store.corpus_hash, *size), store.classes


def resolve_source(source: DataSourceSettings, settings: DataSettings) -> ResolvedSource:
    """What a source is: a rule, a built folder, a Megatron corpus, or text."""
    name = source.source
    if name.startswith("synthetic:"):
        check_synthetic_source(name, settings)
        return ResolvedSource(source, "synthetic", name)
    if name != "stdlib" and not name.startswith("hf:"):
        path = Path(name).expanduser()
        if is_built_corpus(path):
            if problem := find_damage(
                path, manifest := read_corpus_manifest(path), checksums=_is_cheap_to_checksum(manifest)
            ):
                raise InputError(f"{problem}; build the corpus again")
            return ResolvedSource(source, "built", str(path.resolve()))
        if (prefix := find_megatron_prefix(name)) is not None:
            return ResolvedSource(source, "megatron", str(prefix.resolve()))
    return ResolvedSource(source, "built", "", discover_corpus(name))


def num_workers(settings: DataSettings) -> int:
    """Processes that tokenise: as the settings say, else the cores that this process may use."""
    if settings.workers is not None:
        return settings.workers
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def tokenizer_from_settings(
    settings: DataSettings, texts: list[TrainingText], progress: ProgressCallback
) -> tuple[Tokenizer, int]:
    """The tokenizer that the settings name, trained on the texts where it must be, and the sentinels reserved in it."""
    sentinels = NUM_SENTINELS if settings.objective == "spans" else 0
    size = bpe_vocab_size(settings.tokenizer, sentinels)
    if size is None:
        return load_tokenizer(settings.tokenizer, sentinels), sentinels
    if not texts:
        raise InputError(
            f"data.tokenizer = {settings.tokenizer!r} is trained on text, but no source holds text; use `bytes` "
            "for made samples, or the path of the tokenizer.json that the tokens were made with"
        )
    bytes_of_text = sum(corpus.size for corpus, _, _ in texts)
    progress("training the tokenizer", 0, bytes_of_text)
    tokenizer = train_bpe(texts, size, sentinels)
    progress("training the tokenizer", bytes_of_text, bytes_of_text)
    return tokenizer, sentinels


def _resolve_tokenizer(
    settings: DataSettings, sources: list[ResolvedSource], cache: Path, progress: ProgressCallback
) -> tuple[str, Tokenizer, int]:
    """How the tokenizer is loaded again, itself, and its reserved sentinels; that of built folders goes first."""
    folders = [source.location for source in sources if source.location and source.kind == "built"]
    built_tokenizers = [(folder, *load_corpus_tokenizer(Path(folder))) for folder in folders]
    for location, _, other_tokenizer, _ in built_tokenizers[1:]:
        if other_tokenizer.fingerprint != built_tokenizers[0][2].fingerprint:
            raise InputError(
                f"data.mixture: {built_tokenizers[0][0]} and {location} were built with different tokenizers; build one again"
            )
    if built_tokenizers:
        _, tokenizer_spec, tokenizer, sentinels = built_tokenizers[0]
    else:
        labelled = settings.objective == "classify"
        texts = [(source.corpus, source.fields, labelled) for source in sources if source.corpus is not None]
        tokenizer_spec = (
            settings.tokenizer if settings.tokenizer == "bytes" else str(Path(settings.tokenizer).expanduser())
        )
        if bpe_vocab_size(tokenizer_spec, 0) is not None and texts:
            tokenizer_spec = str(_cached_tokenizer_folder(settings, texts, cache, progress))
        tokenizer, sentinels = tokenizer_from_settings(
            settings.model_copy(update={"tokenizer": tokenizer_spec}), texts, progress
        )
    check_tokenizer_for_objective(tokenizer, settings)
    return tokenizer_spec, tokenizer, sentinels


def load_corpus_tokenizer(folder: Path) -> tuple[str, Tokenizer, int]:
    """How the tokenizer of a built folder is loaded again, itself, and its reserved sentinels."""
    manifest = read_corpus_manifest(folder)
    spec = "bytes" if manifest.tokenizer == "bytes" else str(folder)
    return spec, load_tokenizer(spec, manifest.sentinels), manifest.sentinels


def check_tokenizer_for_objective(tokenizer: Tokenizer, settings: DataSettings) -> None:
    """Refuse a tokenizer without the special tokens that the objective needs."""
    if settings.objective == "masked" and tokenizer.mask_id is None:
        missing = "mask token; name it as mask_token in a tokenizer_config.json beside it"
    elif settings.objective == "spans" and not tokenizer.sentinel_ids:
        missing = "sentinels (<|span_0|> or <extra_id_0> and so on); use bpe:SIZE or `bytes` and build for `spans`"
    else:
        return
    raise InputError(f"data.objective = {settings.objective!r}: the tokenizer has no {missing}")


def _cached_tokenizer_folder(
    settings: DataSettings, texts: list[TrainingText], cache: Path, progress: ProgressCallback
) -> Path:
    """The folder of the tokenizer trained on these texts, from the cache or new."""
    names = [
        (corpus.identity, fields.model_dump(exclude={"weight", "source"}), labelled)
        for corpus, fields, labelled in texts
    ]
    key = hashlib.blake2b(
        json.dumps([settings.tokenizer, settings.objective == "spans", names]).encode(), digest_size=12
    )
    folder = cache / f"tokenizer-{key.hexdigest()}"
    with report_write_errors(cache):
        cache.mkdir(parents=True, exist_ok=True)
        with filelock.FileLock(cache / f".{folder.name}.lock"):
            try:
                load_tokenizer(str(folder))
            except InputError:  # not there yet, or damaged
                tokenizer, _ = tokenizer_from_settings(settings, texts, progress)
                shutil.rmtree(folder, ignore_errors=True)
                scratch = folder.with_name(folder.name + ".tmp")
                scratch.mkdir(exist_ok=True)
                tokenizer.save(scratch)
                scratch.replace(folder)
    return folder


def _cached_corpus_folder(spec: CorpusBuildSpec, cache: Path, workers: int, progress: ProgressCallback) -> Path:
    """The folder of a corpus in the cache, built if it is not there or not whole."""
    folder = cache / spec.key
    try:
        manifest = read_corpus_manifest(folder)
        is_complete = find_damage(folder, manifest, checksums=_is_cheap_to_checksum(manifest)) is None
    except InputError:
        is_complete = False
    if not is_complete:
        build_corpus(spec, folder, workers, progress, is_cache_folder=True)
    return folder


def _is_cheap_to_checksum(manifest: CorpusManifest) -> bool:
    return manifest.tokens * 4 < _MAX_CHECKSUM_BYTES
