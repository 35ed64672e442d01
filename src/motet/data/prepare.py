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
from motet.data.bpe import Text, train_bpe, trained_size
from motet.data.build import Progress, Recipe, build, refuse_foreign
from motet.data.corpus import Corpus, find_corpus
from motet.data.made import CLASSES, check_made
from motet.data.megatron import find_prefix
from motet.data.prepared import Kind, Prepared, PreparedCorpus
from motet.data.samples import open_corpus, open_samples
from motet.data.settings import DataSettings, SourceSettings
from motet.data.store import Manifest, find_damage, is_built, read_manifest, writing
from motet.data.tokens import SENTINELS, Tokenizer, load_tokenizer

_CHECKED = 256 << 20
"""Bytes up to which the content of a built folder is checked at each start, not only its sizes (about 1 GB/s)."""


@dataclass(frozen=True)
class Located:
    """A source, and what it turned out to be."""

    fields: SourceSettings
    kind: Kind
    place: str
    corpus: Corpus | None = None
    """The documents, where they are still to be tokenised."""


def prepare(settings: DataSettings, progress: Progress | None = None) -> Prepared:
    """The data of a job, built into the cache where it is not there yet."""
    tell = progress or (lambda what, done, total: None)
    sources = [locate(source, settings) for source in settings.sources()]
    cache = Path(settings.cache or "~/.cache/motet").expanduser()
    spec, tokenizer, sentinels = _tokenizer(settings, sources, cache, tell)
    corpora, classes = [], 0
    for source in sources:
        place, kind = source.place, source.kind
        if source.corpus is not None:
            recipe = Recipe(source.corpus, source.fields, settings.objective == "classify", tokenizer, sentinels)
            place = str(_built(recipe, cache, workers_of(settings), tell))
        corpus, labels = _opened(kind, place, source.fields.weight)
        corpora.append(corpus)
        classes = max(classes, labels)
    train_samples = open_samples(tuple(corpora), settings, tokenizer, seed=0).count("train")
    return Prepared(tuple(corpora), spec, sentinels, tokenizer.vocab_size, classes, train_samples)


def build_folder(fields: SourceSettings, settings: DataSettings, out: Path, progress: Progress) -> Manifest:
    """Build one source of text into a folder of the user's choice."""
    refuse_foreign(out)
    source = locate(fields, settings)
    if source.corpus is None:
        raise InputError(f"data source {fields.source!r} holds no text to build from: it is {source.kind} already")
    labelled = settings.objective == "classify"
    tokenizer, sentinels = tokenizer_of(settings, [(source.corpus, fields, labelled)], progress)
    check_objective(tokenizer, settings)
    return build(Recipe(source.corpus, fields, labelled, tokenizer, sentinels), out, workers_of(settings), progress)


def _opened(kind: Kind, place: str, weight: float) -> tuple[PreparedCorpus, int]:
    """A corpus that is ready to be read, and its classes."""
    if kind == "made":
        return PreparedCorpus(kind, place, weight, "", 0, 0), CLASSES
    store = open_corpus(kind, place)
    size = (len(store.documents), int(store.first_token[-1]))
    return PreparedCorpus(kind, place, weight, store.corpus_hash, *size), store.classes


def locate(source: SourceSettings, settings: DataSettings) -> Located:
    """What a source is: a rule, a built folder, a Megatron corpus, or text."""
    name = source.source
    if name.startswith("made:"):
        check_made(name, settings)
        return Located(source, "made", name)
    if name != "stdlib" and not name.startswith("hf:"):
        path = Path(name).expanduser()
        if is_built(path):
            if problem := find_damage(path, manifest := read_manifest(path), checksums=_is_small(manifest)):
                raise InputError(f"{problem}; build the corpus again")
            return Located(source, "built", str(path.resolve()))
        if (prefix := find_prefix(name)) is not None:
            return Located(source, "megatron", str(prefix.resolve()))
    return Located(source, "built", "", find_corpus(name))


def workers_of(settings: DataSettings) -> int:
    """Processes that tokenise: as the settings say, else the cores that this process may use."""
    if settings.workers is not None:
        return settings.workers
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def tokenizer_of(settings: DataSettings, texts: list[Text], progress: Progress) -> tuple[Tokenizer, int]:
    """The tokenizer that the settings name, trained on the texts where it must be, and the sentinels reserved in it."""
    sentinels = SENTINELS if settings.objective == "spans" else 0
    size = trained_size(settings.tokenizer, sentinels)
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


def _tokenizer(
    settings: DataSettings, sources: list[Located], cache: Path, progress: Progress
) -> tuple[str, Tokenizer, int]:
    """How the tokenizer is loaded again, itself, and its reserved sentinels; that of built folders goes first."""
    folders = [source.place for source in sources if source.place and source.kind == "built"]
    given = [(folder, *tokenizer_in(Path(folder))) for folder in folders]
    for place, _, other, _ in given[1:]:
        if other.fingerprint != given[0][2].fingerprint:
            raise InputError(
                f"data.mixture: {given[0][0]} and {place} were built with different tokenizers; build one again"
            )
    if given:
        _, spec, tokenizer, sentinels = given[0]
    else:
        labelled = settings.objective == "classify"
        texts = [(source.corpus, source.fields, labelled) for source in sources if source.corpus is not None]
        spec = settings.tokenizer if settings.tokenizer == "bytes" else str(Path(settings.tokenizer).expanduser())
        if trained_size(spec, 0) is not None and texts:
            spec = str(_trained(settings, texts, cache, progress))
        tokenizer, sentinels = tokenizer_of(settings.model_copy(update={"tokenizer": spec}), texts, progress)
    check_objective(tokenizer, settings)
    return spec, tokenizer, sentinels


def tokenizer_in(folder: Path) -> tuple[str, Tokenizer, int]:
    """How the tokenizer of a built folder is loaded again, itself, and its reserved sentinels."""
    manifest = read_manifest(folder)
    spec = "bytes" if manifest.tokenizer == "bytes" else str(folder)
    return spec, load_tokenizer(spec, manifest.sentinels), manifest.sentinels


def check_objective(tokenizer: Tokenizer, settings: DataSettings) -> None:
    """Refuse a tokenizer without the special tokens that the objective needs."""
    if settings.objective == "masked" and tokenizer.mask_id is None:
        missing = "mask token; name it as mask_token in a tokenizer_config.json beside it"
    elif settings.objective == "spans" and not tokenizer.sentinel_ids:
        missing = "sentinels (<|span_0|> or <extra_id_0> and so on); use bpe:SIZE or `bytes` and build for `spans`"
    else:
        return
    raise InputError(f"data.objective = {settings.objective!r}: the tokenizer has no {missing}")


def _trained(settings: DataSettings, texts: list[Text], cache: Path, progress: Progress) -> Path:
    """The folder of the tokenizer trained on these texts, from the cache or new."""
    names = [
        (corpus.identity, fields.model_dump(exclude={"weight", "source"}), labelled)
        for corpus, fields, labelled in texts
    ]
    key = hashlib.blake2b(
        json.dumps([settings.tokenizer, settings.objective == "spans", names]).encode(), digest_size=12
    )
    folder = cache / f"tokenizer-{key.hexdigest()}"
    with writing(cache):
        cache.mkdir(parents=True, exist_ok=True)
        with filelock.FileLock(cache / f".{folder.name}.lock"):
            try:
                load_tokenizer(str(folder))
            except InputError:  # not there yet, or damaged
                tokenizer, _ = tokenizer_of(settings, texts, progress)
                shutil.rmtree(folder, ignore_errors=True)
                scratch = folder.with_name(folder.name + ".tmp")
                scratch.mkdir(exist_ok=True)
                tokenizer.save(scratch)
                scratch.replace(folder)
    return folder


def _built(recipe: Recipe, cache: Path, workers: int, progress: Progress) -> Path:
    """The folder of a corpus in the cache, built if it is not there or not whole."""
    folder = cache / recipe.key
    try:
        manifest = read_manifest(folder)
        whole = find_damage(folder, manifest, checksums=_is_small(manifest)) is None
    except InputError:
        whole = False
    if not whole:
        build(recipe, folder, workers, progress, owned=True)
    return folder


def _is_small(manifest: Manifest) -> bool:
    return manifest.tokens * 4 < _CHECKED
