"""Building a corpus: ranges of text become shards of tokens in parallel, and an interrupted build continues.
A shard is renamed when it is written, and then marked as done with its checksum. The next build keeps the shards whose
mark and content agree, so the folder has the same bytes however often its build was interrupted."""

import hashlib
import json
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path

import filelock
import numpy as np

from motet.core.errors import InputError, check_input
from motet.data.corpus import token_store
from motet.data.corpus.discover import SourceFileRanges
from motet.data.corpus.shard_writer import CorpusBuildPlan, build_shard, read_build_plan, read_finished_shard
from motet.data.corpus.token_store import (
    CorpusManifest,
    TokenDtype,
    delete_corpus_files,
    is_corpus_file,
    write_json_atomically,
)
from motet.data.corpus.tokenize_workers import build_in_processes, wait_for_orphans
from motet.data.corpus.tokenizer import Tokenizer
from motet.data.settings import DataSourceSettings

ProgressCallback = Callable[[str, int, int], None]  # Called with the activity, the bytes done, and all bytes

_IN_PROCESS_BYTES = 1 << 20  # Less text than this takes less time than starting a process


@dataclass(frozen=True)
class CorpusBuildSpec:
    """Everything that decides the content of a built folder."""

    corpus: SourceFileRanges
    fields: DataSourceSettings
    has_labels: bool
    tokenizer: Tokenizer
    num_sentinels: int

    @property
    def key(self) -> str:
        """A hash of everything that decides the content."""
        names = self.fields.model_dump(exclude={"weight", "source"})
        tokenizer = (self.tokenizer.fingerprint, self.num_sentinels)
        parts = [token_store.CORPUS_FORMAT_VERSION, self.corpus.identity, names, self.has_labels, *tokenizer]
        return hashlib.blake2b(json.dumps(parts).encode(), digest_size=12).hexdigest()


def build_corpus(
    spec: CorpusBuildSpec, out: Path, *, workers: int, progress: ProgressCallback, is_cache_folder: bool = False
) -> CorpusManifest:
    """The built folder, new or continued; an undamaged finished one is not changed.
    The key of its spec names a cache folder, so any other content of it is damage, and built again."""
    with token_store.report_write_errors(out):
        out.parent.mkdir(parents=True, exist_ok=True)
        # The second process waits for the first and then needs no build.
        with filelock.FileLock(out.parent / f".{out.name}.lock"):
            if out.is_dir():
                wait_for_orphans(out)
            try:
                if finished := _finished_manifest(spec, out):
                    return finished
            except InputError:
                if not is_cache_folder:
                    raise
                delete_corpus_files(out)
            return _build_shards(spec, out, workers=workers, progress=progress)


def check_output_folder(out: Path) -> None:
    """Raise for a folder that holds something else, before anything is trained; `build_corpus` checks again."""
    files = _files_in(out)
    if not any(map(is_corpus_file, files)):
        _check_empty(out, files)


def _files_in(out: Path) -> list[Path]:
    check_input(not out.exists() or out.is_dir(), f"{out} is a file; choose a folder")
    return sorted(out.iterdir()) if out.is_dir() else []


def _check_empty(out: Path, files: list[Path]) -> None:
    if files:
        raise InputError(f"{out} is not empty and holds no corpus (but {files[0].name!r}); choose another folder")


def _finished_manifest(spec: CorpusBuildSpec, out: Path) -> CorpusManifest | None:
    """The manifest of an earlier build of the same spec; a damaged one is deleted, other content raises."""
    files = _files_in(out)
    if token_store.is_built_corpus(out):
        manifest = token_store.read_corpus_manifest(out)
        built = f"built from {manifest.source!r}, or from other files or settings than now"
        other = f"{out} holds another corpus ({built}); choose another folder or delete it"
        check_input(manifest.recipe == spec.key, other)
        if token_store.find_damage(out, manifest, checksums=True) is None:
            return manifest
        delete_corpus_files(out)
    elif out / "plan.json" not in files:
        _check_empty(out, [file for file in files if file.name != "plan.json.tmp"])
    return None


def _build_shards(spec: CorpusBuildSpec, out: Path, *, workers: int, progress: ProgressCallback) -> CorpusManifest:
    plan = _write_plan(spec, out)
    missing = [i for i in range(len(plan.shards)) if not read_finished_shard(out, i, verify=True)]
    total, bytes_done = spec.corpus.size, 0

    def advance(bytes_read: int) -> None:
        nonlocal bytes_done
        bytes_done += bytes_read
        progress("tokenising", min(bytes_done, total), total)

    advance(sum(part.size for i, shard in enumerate(plan.shards) if i not in missing for part in shard))
    if total < _IN_PROCESS_BYTES:
        for shard_id in missing:
            build_shard(out, plan, shard_id, tokenizer=spec.tokenizer, advance=advance)
    elif missing:
        build_in_processes(out, missing, workers=workers, advance=advance)
    return _write_manifest(spec, plan, out)


def _write_plan(spec: CorpusBuildSpec, out: Path) -> CorpusBuildPlan:
    tokenizer = "bytes" if spec.tokenizer.is_byte_level else "tokenizer.json"
    dtype: TokenDtype = "uint16" if spec.tokenizer.vocab_size <= 1 << 16 else "uint32"
    plan = CorpusBuildPlan(
        spec.key, spec.fields, spec.has_labels, tokenizer, spec.num_sentinels, dtype, shards=spec.corpus.shards()
    )
    earlier = read_build_plan(out)
    if earlier != plan:
        out.mkdir(exist_ok=True)
        delete_corpus_files(out)
        write_json_atomically(out / "plan.json", {**asdict(plan), "fields": plan.fields.model_dump()})
    # Written again even if it exists: the build may have been interrupted in the middle of the file.
    if not spec.tokenizer.is_byte_level:
        spec.tokenizer.save(out)
    return plan


def _write_manifest(spec: CorpusBuildSpec, plan: CorpusBuildPlan, out: Path) -> CorpusManifest:
    entries = (read_finished_shard(out, i, verify=False) for i in range(len(plan.shards)))
    shards = [entry for entry in entries if entry is not None]
    assert len(shards) == len(plan.shards), "every shard was just built"
    if not any(shard.documents for shard in shards):
        delete_corpus_files(out)
        out.rmdir()
        raise InputError(f"data source {spec.corpus.name!r} is empty: it holds no document with text")
    table = np.concatenate([np.fromfile(out / f"{i:05}.docs", token_store.DOCUMENT_DTYPE) for i in range(len(shards))])
    manifest = CorpusManifest(
        source=spec.corpus.name,
        recipe=plan.recipe,
        tokenizer=plan.tokenizer,
        sentinels=plan.sentinels,
        vocab_size=spec.tokenizer.vocab_size,
        dtype=plan.dtype,
        documents=sum(shard.documents for shard in shards),
        tokens=sum(shard.tokens for shard in shards),
        corpus_hash=hashlib.blake2b(table["hash"].tobytes(), digest_size=16).hexdigest(),
        loss_mask=bool(table["skip"].any()),
        classes=int(table["label"].max()) + 1,
        shards=tuple(shards),
    )
    write_json_atomically(out / "manifest.json", manifest.to_json())
    for path in [out / "plan.json", *out.glob("*.done"), *out.glob("*.tmp")]:
        path.unlink(missing_ok=True)
    return manifest
