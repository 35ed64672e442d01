"""Building a corpus: pieces of text become shards of tokens, several at once, and a broken-off build goes on.

A shard is written under another name, renamed, and then marked as done with its checksum. Whoever builds again keeps
the shards whose mark and content agree and makes the rest. The tokens depend on the text and the tokenizer alone, so
the folder is the same to the byte however often and wherever it was broken off.
"""

import hashlib
import json
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path

import filelock
import numpy as np

from motet.core.errors import InputError
from motet.data.corpus.discover import CorpusFiles
from motet.data.corpus.shard_writer import CorpusBuildPlan, build_shard, read_build_plan, read_finished_shard
from motet.data.corpus.token_store import (
    CORPUS_FORMAT_VERSION,
    DOCUMENT_DTYPE,
    CorpusManifest,
    CorpusShardEntry,
    delete_corpus_files,
    find_damage,
    is_built_corpus,
    is_corpus_file,
    read_corpus_manifest,
    report_write_errors,
    write_json_atomically,
)
from motet.data.corpus.tokenize_workers import build_in_processes, wait_for_orphans
from motet.data.corpus.tokenizer import Tokenizer
from motet.data.settings import DataSourceSettings

ProgressCallback = Callable[[str, int, int], None]  # Called with what is being done, and how many bytes of how many are

_IN_PROCESS_BYTES = 1 << 20  # Bytes of text below which starting a process takes longer than the work


@dataclass(frozen=True)
class CorpusBuildSpec:
    """All that decides the content of a built folder."""

    corpus: CorpusFiles
    fields: DataSourceSettings
    has_labels: bool
    tokenizer: Tokenizer
    num_sentinels: int

    @property
    def key(self) -> str:
        """A name for this content."""
        names = self.fields.model_dump(exclude={"weight", "source"})
        parts = [
            CORPUS_FORMAT_VERSION,
            self.corpus.identity,
            names,
            self.has_labels,
            self.tokenizer.fingerprint,
            self.num_sentinels,
        ]
        return hashlib.blake2b(json.dumps(parts).encode(), digest_size=12).hexdigest()

    @property
    def dtype(self) -> str:
        return "uint16" if self.tokenizer.vocab_size <= 1 << 16 else "uint32"


def build_corpus(
    spec: CorpusBuildSpec, out: Path, workers: int, progress: ProgressCallback, is_cache_folder: bool = False
) -> CorpusManifest:
    """The built folder, new or continued; one that is finished and whole is left as it is.

    An `owned` folder is named by its recipe, in a cache: whatever else is found in it is damage, and made again.
    """
    with report_write_errors(out):
        out.parent.mkdir(parents=True, exist_ok=True)
        # Whoever comes second waits for the first and finds the work done.
        with filelock.FileLock(out.parent / f".{out.name}.lock"):
            if out.is_dir():
                wait_for_orphans(out)
            try:
                finished = _finished_manifest(spec, out)
            except InputError:
                if not is_cache_folder:
                    raise
                delete_corpus_files(out)
                finished = None
            return finished or _build_missing_shards(spec, out, workers, progress)


def check_output_folder(out: Path) -> None:
    """Before anything is trained or made; `build` looks closer, while nobody else is at work in the folder."""
    if out.exists() and not out.is_dir():
        raise InputError(f"{out} is a file; choose a folder")
    names = sorted(path.name for path in out.iterdir()) if out.is_dir() else []
    if names and not any(is_corpus_file(name) for name in names):
        raise InputError(f"{out} is not empty and holds no corpus (but {names[0]!r}); choose another folder")


def _finished_manifest(spec: CorpusBuildSpec, out: Path) -> CorpusManifest | None:
    """The manifest of an earlier build of the same; a damaged one is cleared away, anything else is refused."""
    if out.exists() and not out.is_dir():
        raise InputError(f"{out} is a file; choose a folder")
    if is_built_corpus(out):
        manifest = read_corpus_manifest(out)
        if manifest.recipe != spec.key:
            raise InputError(
                f"{out} holds another corpus (built from {manifest.source!r}, or from other files or settings than "
                "now); choose another folder or delete it"
            )
        if find_damage(out, manifest, checksums=True) is None:
            return manifest
        delete_corpus_files(out)
    elif out.is_dir() and not (out / "plan.json").is_file():
        foreign_names = sorted(path.name for path in out.iterdir() if path.name != "plan.json.tmp")
        if foreign_names:
            raise InputError(
                f"{out} is not empty and holds no corpus (but {foreign_names[0]!r}); choose another folder"
            )
    return None


def _build_missing_shards(spec: CorpusBuildSpec, out: Path, workers: int, progress: ProgressCallback) -> CorpusManifest:
    plan = _write_plan(spec, out)
    done = {shard_id for shard_id in range(len(plan.shards)) if read_finished_shard(out, shard_id, verify=True)}
    missing = [number for number in range(len(plan.shards)) if number not in done]
    progress("tokenising", bytes_done := sum(plan.shard_bytes(number) for number in done), spec.corpus.size)

    def advance(bytes_read: int) -> None:
        nonlocal bytes_done
        bytes_done += bytes_read
        progress("tokenising", min(bytes_done, spec.corpus.size), spec.corpus.size)

    if spec.corpus.size < _IN_PROCESS_BYTES:
        for number in missing:
            build_shard(out, plan, number, spec.tokenizer, advance)
    elif missing:
        build_in_processes(out, missing, workers, advance)
    return _write_manifest(spec, plan, out)


def _write_plan(spec: CorpusBuildSpec, out: Path) -> CorpusBuildPlan:
    """The plan of an unfinished build when it is the same as ours; else the folder starts anew."""
    has_tokenizer_file = not spec.tokenizer.is_byte_level
    plan = CorpusBuildPlan(
        recipe=spec.key,
        fields=spec.fields,
        labelled=spec.has_labels,
        tokenizer="tokenizer.json" if has_tokenizer_file else "bytes",
        sentinels=spec.num_sentinels,
        dtype=spec.dtype,
        shards=spec.corpus.shards(),
    )
    earlier = read_build_plan(out)
    if earlier is None or earlier.recipe != plan.recipe:
        out.mkdir(exist_ok=True)
        delete_corpus_files(out)
        write_json_atomically(out / "plan.json", plan.to_json())
    # Written anew even when it is there: the build may have been broken off in the middle of it.
    if has_tokenizer_file:
        spec.tokenizer.save(out)
    return plan


def _write_manifest(spec: CorpusBuildSpec, plan: CorpusBuildPlan, out: Path) -> CorpusManifest:
    """Sum up the shards, write the manifest, and clear away what only an unfinished build needs."""
    shard_ids = range(len(plan.shards))
    entries = [
        entry for shard_id in shard_ids if (entry := read_finished_shard(out, shard_id, verify=False)) is not None
    ]
    assert len(entries) == len(plan.shards), "every shard was just built"
    digest, classes, loss_mask = hashlib.blake2b(digest_size=16), 0, False
    for number in shard_ids:
        table = np.fromfile(out / f"{number:05}.docs", dtype=DOCUMENT_DTYPE)
        digest.update(table["hash"].tobytes())
        classes = max(classes, int(table["label"].max(initial=-1)) + 1)
        loss_mask = loss_mask or bool(table["skip"].any())
    if not any(entry.documents for entry in entries):
        delete_corpus_files(out)
        out.rmdir()
        raise InputError(f"data source {spec.corpus.name!r} is empty: it holds no document with text")
    manifest = CorpusManifest(
        source=spec.corpus.name,
        recipe=plan.recipe,
        tokenizer=plan.tokenizer,
        sentinels=plan.sentinels,
        vocab_size=spec.tokenizer.vocab_size,
        dtype=plan.dtype,
        documents=sum(entry.documents for entry in entries),
        tokens=sum(entry.tokens for entry in entries),
        corpus_hash=digest.hexdigest(),
        loss_mask=loss_mask,
        classes=classes,
        shards=tuple(CorpusShardEntry(**asdict(entry)) for entry in entries),
    )
    write_json_atomically(out / "manifest.json", manifest.to_json())
    for path in [out / "plan.json", *out.glob("*.done"), *out.glob("*.tmp")]:
        path.unlink(missing_ok=True)
    return manifest
