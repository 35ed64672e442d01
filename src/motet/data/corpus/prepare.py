"""The work before the first sample: find or train the tokenizer, and build the corpora that are not in the cache.
Any number of processes may call `prepare_data` concurrently; one does the work and the others wait for it."""

import hashlib
import json
import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import filelock

from motet.cluster.host_limits import usable_cores
from motet.core.errors import InputError, check_input
from motet.data.corpus import token_store
from motet.data.corpus.build import CorpusBuildSpec, ProgressCallback, build_corpus, check_output_folder
from motet.data.corpus.discover import SourceFileRanges, TextDocument, discover_corpus, read_documents
from motet.data.corpus.token_store import CorpusKind, CorpusManifest, PreparedCorpus, PreparedData, find_megatron_prefix
from motet.data.corpus.tokenizer import Tokenizer, bpe_vocab_size, load_tokenizer, train_bpe
from motet.data.samples.dataset import NUM_CLASSES, check_synthetic_source, open_mixture_dataset, open_token_store
from motet.data.settings import NUM_SENTINELS, DataSettings, DataSourceSettings

# Bytes up to which the content of a built folder is checked at each start, not only its sizes (about 1 GB/s).
_MAX_CHECKSUM_BYTES = 256 << 20

# Bytes of text that train a tokenizer, evenly distributed over a larger corpus; more hardly changes the merges.
_MAX_TRAINING_BYTES = 64 << 20


@dataclass(frozen=True)
class ResolvedSource:
    """A data source, and the kind of corpus that it is."""

    fields: DataSourceSettings
    kind: CorpusKind
    location: str
    corpus: SourceFileRanges | None = None  # The documents, if they are still to be tokenised


class LoadedTokenizer(NamedTuple):
    """A tokenizer, the spec that loads it again, and the sentinels reserved in it."""

    spec: str
    tokenizer: Tokenizer
    num_sentinels: int


def prepare_data(settings: DataSettings, progress: ProgressCallback | None = None) -> PreparedData:
    """The data of a job, built into the cache if it is not there yet."""
    progress = progress or (lambda activity, done, total: None)
    sources = [resolve_source(source, settings) for source in settings.sources()]
    cache = Path(settings.cache or "~/.cache/motet").expanduser()
    tokenizer_spec, tokenizer, sentinels = _resolve_tokenizer(settings, sources, cache, progress=progress)
    corpora, classes = [], 0
    for source in sources:
        location = source.location
        if source.corpus is not None:
            spec = CorpusBuildSpec(source.corpus, source.fields, settings.objective == "classify", tokenizer, sentinels)
            location = str(folder := cache / spec.key)
            try:
                _check_corpus_folder(folder)
            except InputError:
                build_corpus(
                    spec, folder, workers=settings.workers or usable_cores(), progress=progress, is_cache_folder=True
                )
        is_synthetic = source.kind == "synthetic"
        corpora.append(PreparedCorpus(source.kind, location, source.fields.weight))
        classes = max(classes, NUM_CLASSES if is_synthetic else open_token_store(source.kind, location).classes)
    train_samples = open_mixture_dataset(tuple(corpora), settings, tokenizer, seed=0).count("train")
    return PreparedData(tuple(corpora), tokenizer_spec, sentinels, tokenizer.vocab_size, classes, train_samples)


def find_tokenizer(settings: DataSettings, progress: ProgressCallback | None = None) -> LoadedTokenizer:
    """The tokenizer of a job, which is trained again if it is not in the cache any more."""
    sources = [resolve_source(source, settings) for source in settings.sources()]
    cache = Path(settings.cache or "~/.cache/motet").expanduser()
    return _resolve_tokenizer(settings, sources, cache, progress=progress or (lambda activity, done, total: None))


def find_data(settings: DataSettings) -> tuple[int | None, int | None]:
    """(Tokens of the tokenizer, classes of synthetic samples), where they are known without building anything. Raises
    as `prepare_data` does for a source or a tokenizer that is missing; datasets of Hugging Face are not looked for."""
    sources = [resolve_source(source, settings) for source in settings.sources() if not source.source.startswith("hf:")]
    folders = [Path(source.location) for source in sources if source.location and source.kind == "built"]
    classes = NUM_CLASSES if any(source.kind == "synthetic" for source in sources) else None
    sentinels = NUM_SENTINELS if settings.objective == "spans" else 0
    size = None if folders else bpe_vocab_size(settings.tokenizer, sentinels)
    if size is not None:
        return size, classes
    loaded = load_corpus_tokenizer(folders[0]).tokenizer if folders else load_tokenizer(settings.tokenizer, sentinels)
    check_tokenizer_for_objective(loaded, settings)
    return loaded.vocab_size, classes


def build_corpus_folder(
    fields: DataSourceSettings, settings: DataSettings, out: Path, *, progress: ProgressCallback
) -> CorpusManifest:
    """Build one source of text into a folder of the user's choice."""
    check_output_folder(out)
    source = resolve_source(fields, settings)
    if source.corpus is None:
        raise InputError(f"data source {fields.source!r} holds no text to build from: it is {source.kind} already")
    _, tokenizer, sentinels = tokenizer_from_settings(settings, [source], progress)
    check_tokenizer_for_objective(tokenizer, settings)
    spec = CorpusBuildSpec(source.corpus, fields, settings.objective == "classify", tokenizer, sentinels)
    return build_corpus(spec, out, workers=settings.workers or usable_cores(), progress=progress)


def resolve_source(source: DataSourceSettings, settings: DataSettings) -> ResolvedSource:
    """Find out whether a source is synthetic, a built folder, a Megatron corpus, or text."""
    name, path = source.source, Path(source.source).expanduser()
    if name.startswith("synthetic:"):
        check_synthetic_source(name, settings)
        return ResolvedSource(source, "synthetic", name)
    if name != "stdlib" and not name.startswith("hf:"):
        if token_store.is_built_corpus(path):
            _check_corpus_folder(path)
            return ResolvedSource(source, "built", str(path.resolve()))
        if (prefix := find_megatron_prefix(name)) is not None:
            return ResolvedSource(source, "megatron", str(prefix.resolve()))
    return ResolvedSource(source, "built", "", discover_corpus(name))


def tokenizer_from_settings(
    settings: DataSettings, sources: list[ResolvedSource], progress: ProgressCallback
) -> LoadedTokenizer:
    """The tokenizer of the settings, trained on the texts of the sources if needed."""
    spec, sentinels = settings.tokenizer, NUM_SENTINELS if settings.objective == "spans" else 0
    size = bpe_vocab_size(spec, sentinels)
    if size is None:
        return LoadedTokenizer(spec, load_tokenizer(spec, sentinels), sentinels)
    corpora = [(source.corpus, source.fields) for source in sources if source.corpus is not None]
    check_input(
        corpora,
        f"data.tokenizer = {spec!r} is trained on text, but no source holds text; use `bytes` for synthetic samples, "
        "or the path of the tokenizer.json that the tokens were made with",
    )
    total = sum(corpus.size for corpus, _ in corpora)
    texts = (
        text
        for corpus, fields in corpora
        for file_range in corpus.file_ranges[:: -(-corpus.size // _MAX_TRAINING_BYTES)]
        for document in read_documents(file_range, fields, settings.objective == "classify")
        for text in _training_texts(document, spec)
    )
    progress("training the tokenizer", 0, total)
    tokenizer = train_bpe(texts, size, sentinels)
    progress("training the tokenizer", total, total)
    return LoadedTokenizer(spec, tokenizer, sentinels)


def _training_texts(document: TextDocument, spec: str) -> tuple[str, str]:
    if document.conversation:
        problem = f"is trained on text and has no chat template, but {document.conversation.location} is a conversation"
        remedy = "give the folder of a Hugging Face tokenizer with a chat template"
        raise InputError(f"data.tokenizer = {spec!r} {problem}; {remedy}")
    return document.prompt or "", document.text


def _resolve_tokenizer(
    settings: DataSettings, sources: list[ResolvedSource], cache: Path, *, progress: ProgressCallback
) -> LoadedTokenizer:
    folders = [source.location for source in sources if source.location and source.kind == "built"]
    loaded = [load_corpus_tokenizer(Path(folder)) for folder in folders]
    for folder, other in zip(folders, loaded, strict=True):
        check_input(
            other.tokenizer.fingerprint == loaded[0].tokenizer.fingerprint,
            f"data.mixture: {folders[0]} and {folder} were built with different tokenizers; build one again",
        )
    if not loaded:
        spec = settings.tokenizer if settings.tokenizer == "bytes" else str(Path(settings.tokenizer).expanduser())
        if bpe_vocab_size(spec, 0) is not None and any(source.corpus for source in sources):
            spec = str(_cached_tokenizer_folder(settings, sources, cache, progress=progress))
        loaded = [tokenizer_from_settings(settings.model_copy(update={"tokenizer": spec}), sources, progress)]
    check_tokenizer_for_objective(loaded[0].tokenizer, settings)
    return loaded[0]


def load_corpus_tokenizer(folder: Path) -> LoadedTokenizer:
    """The tokenizer of a built folder."""
    manifest = token_store.read_corpus_manifest(folder)
    problem = f"{manifest.sentinels} sentinels are more than {NUM_SENTINELS}"
    path = folder / "manifest.json"
    check_input(manifest.sentinels <= NUM_SENTINELS, f"{path} is damaged ({problem}); build the corpus again")
    spec = "bytes" if manifest.tokenizer == "bytes" else str(folder)
    return LoadedTokenizer(spec, load_tokenizer(spec, manifest.sentinels), manifest.sentinels)


def check_tokenizer_for_objective(tokenizer: Tokenizer, settings: DataSettings) -> None:
    """Raise for a tokenizer without the special tokens that the objective needs."""
    check_input(
        settings.objective != "masked" or tokenizer.mask_id is not None,
        "data.objective = 'masked': the tokenizer has no mask token; name it as mask_token in a tokenizer_config.json "
        "in the same folder",
    )
    check_input(
        settings.objective != "spans" or tokenizer.sentinel_ids,
        "data.objective = 'spans': the tokenizer has no sentinels (<|span_0|> or <extra_id_0> and so on); use bpe:SIZE "
        "or `bytes` and build for `spans`",
    )


def _cached_tokenizer_folder(
    settings: DataSettings, sources: list[ResolvedSource], cache: Path, *, progress: ProgressCallback
) -> Path:
    corpora = [(source.corpus, source.fields) for source in sources if source.corpus is not None]
    has_labels = settings.objective == "classify"
    names = [(corpus.identity, f.model_dump(exclude={"weight", "source"}), has_labels) for corpus, f in corpora]
    parts = json.dumps([settings.tokenizer, settings.objective == "spans", names])
    folder = cache / f"tokenizer-{hashlib.blake2b(parts.encode(), digest_size=12).hexdigest()}"
    with token_store.report_write_errors(cache):
        cache.mkdir(parents=True, exist_ok=True)
        with filelock.FileLock(cache / f".{folder.name}.lock"):
            try:
                load_tokenizer(str(folder))
            except InputError:  # not there yet, or damaged
                trained = tokenizer_from_settings(settings, sources, progress)
                shutil.rmtree(folder, ignore_errors=True)
                scratch = folder.with_name(folder.name + ".tmp")
                scratch.mkdir(exist_ok=True)
                trained.tokenizer.save(scratch)
                scratch.replace(folder)
    return folder


def _check_corpus_folder(folder: Path) -> None:
    manifest = token_store.read_corpus_manifest(folder)
    token_store.check_undamaged(folder, manifest, checksums=manifest.tokens * 4 < _MAX_CHECKSUM_BYTES)
