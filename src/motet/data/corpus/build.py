"""Building a corpus: ranges of text become shards of tokens in parallel, and an interrupted build continues.
A shard is renamed when it is written, and then marked as done with its checksum. The next build keeps the shards whose
mark and content agree, so the folder has the same bytes however often its build was interrupted.

One shard of a corpus: its documents become tokens on disk, then the shard is marked as done.

Tokenising in separate processes, started as `python -m motet.data.corpus.tokenize_workers FOLDER`.
A worker reads shard ids from standard input and answers with lines of JSON. It is not a fork, so any script can start
it after torch; it ends as soon as its parent does.
"""

import contextlib
import fcntl
import hashlib
import json
import os
import queue
import subprocess
import sys
import threading
from collections import Counter, deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import FIRST_EXCEPTION, ThreadPoolExecutor, wait
from dataclasses import asdict, dataclass
from functools import partial
from itertools import chain
from pathlib import Path
from typing import Any, TextIO

import filelock
import numpy as np
from numpy.typing import NDArray

from motet.core.errors import InputError, MotetError, check_input
from motet.core.text_files import parse_json
from motet.data.corpus import token_store
from motet.data.corpus.discover import FileRange, SourceFileRanges, TextDocument, read_documents
from motet.data.corpus.token_store import (
    DOCUMENT_DTYPE,
    CorpusManifest,
    CorpusShardEntry,
    TokenDtype,
    delete_corpus_files,
    is_corpus_file,
    shard_checksum,
    write_json_atomically,
)
from motet.data.corpus.tokenizer import Tokenizer, load_tokenizer
from motet.data.settings import DataSourceSettings

# Characters per call of the tokenizer: bounds the memory, feeds several threads, moves the progress bar.
_CHARACTERS_PER_BATCH = 1 << 20
_MAX_TEXT_CHARACTERS = 1 << 20  # A longer text is split before a line


@dataclass(frozen=True)
class CorpusBuildPlan:
    """The content of plan.json, which describes an unfinished build."""

    recipe: str
    fields: DataSourceSettings
    labelled: bool
    tokenizer: str
    sentinels: int
    dtype: TokenDtype
    shards: list[list[FileRange]]


def read_build_plan(folder: Path) -> CorpusBuildPlan | None:
    """The plan of an unfinished build; None if there is no readable one."""
    try:
        values = parse_json((folder / "plan.json").read_text(encoding="utf-8"))
        fields = DataSourceSettings.model_validate(values["fields"])
        shards = [[FileRange(**file_range) for file_range in shard] for shard in values["shards"]]
        return CorpusBuildPlan(**{**values, "fields": fields, "shards": shards})
    except (OSError, ValueError, TypeError, KeyError):
        return None


def read_finished_shard(folder: Path, shard_id: int, verify: bool) -> CorpusShardEntry | None:
    """The entry of a finished shard; None if it is unfinished, or (with `verify`) has another checksum."""
    try:
        entry = CorpusShardEntry(**parse_json((folder / f"{shard_id:05}.done").read_text(encoding="utf-8")))
        return entry if not verify or shard_checksum(folder, shard_id) == entry.checksum else None
    except (OSError, ValueError, TypeError):
        return None


def build_shard(
    folder: Path, plan: CorpusBuildPlan, shard_id: int, *, tokenizer: Tokenizer, advance: Callable[[int], None]
) -> None:
    """Write NNNNN.bin, NNNNN.docs and the mark NNNNN.done; `advance` gets the bytes of text that were read."""
    tables, num_tokens, name = [np.empty(0, DOCUMENT_DTYPE)], 0, f"{shard_id:05}"
    mask, skipped = _MaskBits(), Counter[str]()
    # An orphan of a killed build may write the same shard, so the name has the process id.
    scratch = folder / f"{name}.{os.getpid()}.tmp"
    with scratch.open("wb") as file:
        for documents, bytes_read in _document_batches(plan, shard_id, skipped):
            tokens, table, is_target = _tokenize(documents, tokenizer, plan.dtype, skipped=skipped)
            file.write(tokens.tobytes())
            mask.append(is_target)
            mask.is_needed |= any(document.conversation for document in documents)
            num_tokens += len(tokens)
            tables.append(table)
            advance(bytes_read)
    table = np.concatenate(tables)
    scratch.replace(folder / f"{name}.bin")
    (folder / f"{name}.mask").unlink(missing_ok=True)  # A damaged build may have left one
    if mask.is_needed:
        scratch.write_bytes(mask.packed())
        scratch.replace(folder / f"{name}.mask")
    scratch.write_bytes(table.tobytes())
    scratch.replace(folder / f"{name}.docs")
    checksum = shard_checksum(folder, shard_id)
    entry = CorpusShardEntry(len(table), num_tokens, checksum, has_mask=mask.is_needed, skipped=dict(skipped))
    write_json_atomically(folder / f"{name}.done", asdict(entry))


def _count_skip(skipped: Counter[str], reason: str) -> None:
    skipped[reason] += 1


def _document_batches(
    plan: CorpusBuildPlan, shard_id: int, skipped: Counter[str]
) -> Iterator[tuple[list[TextDocument], int]]:
    batch: list[TextDocument] = []
    characters = bytes_read = 0
    for file_range in plan.shards[shard_id]:
        on_skip = partial(_count_skip, skipped)
        for document in read_documents(file_range, plan.fields, plan.labelled, on_skip=on_skip):
            batch.append(document)
            characters += len(document.text)
            if characters >= _CHARACTERS_PER_BATCH:
                yield batch, bytes_read
                batch, characters, bytes_read = [], 0, 0
        bytes_read += file_range.size
    yield batch, bytes_read


def _tokenize(
    documents: list[TextDocument], tokenizer: Tokenizer, dtype: str, *, skipped: Counter[str]
) -> tuple[NDArray[Any], NDArray[Any], NDArray[np.bool_]]:
    """The tokens of the documents, their table, and which tokens are targets."""
    bodies = _encode_texts(documents, tokenizer)
    chats = [row for row, document in enumerate(documents) if document.conversation]
    if chats:
        conversations = [each for row in chats if (each := documents[row].conversation)]
        for row, encoded in zip(chats, tokenizer.chat.encode(conversations), strict=True):
            bodies[row] = (encoded.tokens, encoded.is_target)
    table = np.zeros(len(documents), DOCUMENT_DTYPE)
    for row, (document, (body, is_target)) in enumerate(zip(documents, bodies, strict=True)):
        first_target = int(is_target.argmax()) if document.conversation else len(body) - int(is_target.sum())
        # The hash of the content makes equal documents fall into the same split.
        content = hashlib.blake2b(f"{document.prompt or ''}\0{document.text}".encode(), digest_size=8).digest()
        table[row] = (len(body), int.from_bytes(content, "little"), first_target, document.label)
    kept = [row for row, (_, is_target) in enumerate(bodies) if is_target.any()]
    skipped.update({"without a token of the assistant": len(bodies) - len(kept)} if len(kept) < len(bodies) else {})
    tokens = np.fromiter(chain.from_iterable(bodies[row][0] for row in kept), np.dtype(dtype).newbyteorder("<"))
    return tokens, table[kept], np.concatenate([np.empty(0, np.bool_), *(bodies[row][1] for row in kept)])


def _encode_texts(documents: list[TextDocument], tokenizer: Tokenizer) -> list[tuple[list[int], NDArray[np.bool_]]]:
    """The tokens of each text after its prompt, and which are targets; none for a conversation."""
    parts = [
        (row, is_prompt, part)
        for row, document in enumerate(documents)
        if not document.conversation
        for is_prompt, text in ((True, document.prompt or ""), (False, document.text))
        for part in _split_long_text(text)
    ]
    bodies = [list(tokenizer.begin_ids) for _ in documents]
    skips = [len(tokenizer.begin_ids) if document.prompt is not None else 0 for document in documents]
    for (row, is_prompt, _), ids in zip(parts, tokenizer.encode_batch([part for *_, part in parts]), strict=True):
        bodies[row] += ids
        skips[row] += len(ids) if is_prompt else 0
    for body in bodies:
        body.append(tokenizer.end_id)
    return [(body, np.arange(len(body)) >= skip) for body, skip in zip(bodies, skips, strict=True)]


class _MaskBits:
    """The mask of a shard, in bits."""

    def __init__(self) -> None:
        self.is_needed = False  # Whether some conversation has targets that a document's table cannot describe
        self._bytes, self._rest = list[NDArray[np.uint8]](), np.empty(0, np.bool_)

    def append(self, is_target: NDArray[np.bool_]) -> None:
        bits = np.concatenate([self._rest, is_target])
        full = len(bits) // 8 * 8
        self._bytes.append(np.packbits(bits[:full], bitorder="little"))
        self._rest = bits[full:]

    def packed(self) -> bytes:
        return np.concatenate([*self._bytes, np.packbits(self._rest, bitorder="little")]).tobytes()


def _split_long_text(text: str) -> list[str]:
    """Parts that start with a line: tokenizers work by line there, and memory stays bounded."""
    parts = []
    while len(text) > _MAX_TEXT_CHARACTERS:
        split_at = text.rfind("\n", 0, _MAX_TEXT_CHARACTERS) + 1
        # A line that starts with a space may share a token with the line break before it.
        while split_at > 1 and text[split_at].isspace():
            split_at = text.rfind("\n", 0, split_at - 1) + 1
        parts.append(text[: split_at or _MAX_TEXT_CHARACTERS])
        text = text[split_at or _MAX_TEXT_CHARACTERS :]
    return [*parts, text] if text else parts


def build_in_processes(folder: Path, shard_ids: list[int], *, workers: int, advance: Callable[[int], None]) -> None:
    """Build these shards of a planned folder with `workers` processes; the first failure ends all."""
    pending, count = deque(shard_ids), min(workers, len(shard_ids))
    progress_lock = threading.Lock()

    def advance_under_lock(bytes_read: int) -> None:
        with progress_lock:
            advance(bytes_read)

    with _exclusive_folder_lock(folder) as lock:
        processes = [_start_worker(folder, max(1, workers // count), lock) for _ in range(count)]
    with contextlib.ExitStack() as cleanup, ThreadPoolExecutor(count) as pool:
        try:
            futures = [pool.submit(_feed_shards, worker, pending, advance_under_lock) for worker in processes]
            for future in wait(futures, return_when=FIRST_EXCEPTION).done:
                future.result()
        finally:  # also on Ctrl-C: the threads end when their workers do
            for worker in processes:
                worker.kill()
                cleanup.callback(worker.communicate)


@contextlib.contextmanager
def _exclusive_folder_lock(folder: Path) -> Iterator[int]:
    """A lock of the folder that the workers inherit and hold as long as they live, with or without their parent."""
    lock = os.open(folder, os.O_RDONLY)
    try:
        with contextlib.suppress(OSError):  # some network file systems have no such locks
            fcntl.flock(lock, fcntl.LOCK_EX)
        yield lock
    finally:
        os.close(lock)


def wait_for_orphans(folder: Path) -> None:
    """Wait until the workers of a killed build have ended, since one may be writing a file."""
    with _exclusive_folder_lock(folder):
        return


def _start_worker(folder: Path, threads: int, lock: int) -> "subprocess.Popen[str]":
    # A new session: Ctrl-C is for the parent, which ends its workers.
    module, pipe = "motet.data.corpus.build", subprocess.PIPE
    command = ["env", f"RAYON_NUM_THREADS={threads}", sys.executable, "-m", module, str(folder)]
    return subprocess.Popen(command, stdin=pipe, stdout=pipe, text=True, start_new_session=True, pass_fds=(lock,))


def _feed_shards(worker: "subprocess.Popen[str]", pending: deque[int], advance: Callable[[int], None]) -> None:
    assert worker.stdin is not None and worker.stdout is not None
    while True:
        try:
            shard_id = pending.popleft()
        except IndexError:  # all shards are taken
            return
        with contextlib.suppress(BrokenPipeError):  # the worker has ended, which is reported below
            worker.stdin.write(f"{shard_id}\n")
            worker.stdin.flush()
        for line in worker.stdout:
            answer = json.loads(line)
            if "error" in answer:
                raise InputError(answer["error"])
            if "done" in answer:
                break
            advance(answer["read"])
        else:
            code = worker.wait()
            cause = " (killed: out of memory? fewer data.workers need less)" if code < 0 else ""
            remedy = "finished shards are kept, and the same command continues from there"
            raise MotetError(f"a process that tokenised ended with code {code}{cause}; {remedy}")


def run_worker(folder: Path, requests: Iterable[str], answers: TextIO) -> None:
    """Build a shard for every line of the requests."""
    plan = read_build_plan(folder)
    assert plan is not None, f"{folder} has no plan.json"
    tokenizer = load_tokenizer("bytes" if plan.tokenizer == "bytes" else str(folder / plan.tokenizer), plan.sentinels)

    def answer(**value: int | str) -> None:
        answers.write(json.dumps(value) + "\n")
        answers.flush()

    for line in requests:
        try:
            build_shard(folder, plan, int(line), tokenizer=tokenizer, advance=lambda read: answer(read=read))
        except (InputError, OSError) as error:
            problem = str(error)
            if isinstance(error, OSError):
                problem = f"cannot write {error.filename or folder}: {error.strerror or error}; free some space"
            answer(error=problem)
            return
        answer(done=int(line))


def _read_requests(source: TextIO, lines: "queue.SimpleQueue[str]") -> None:
    for line in source:
        lines.put(line)
    os._exit(0)  # the parent has ended: another build may be about to write this shard


if __name__ == "__main__":
    queued: queue.SimpleQueue[str] = queue.SimpleQueue()
    threading.Thread(target=_read_requests, args=(sys.stdin, queued), daemon=True).start()
    # Output that a library prints is not an answer.
    answers, sys.stdout = sys.stdout, sys.stderr
    run_worker(Path(sys.argv[1]), iter(queued.get, ""), answers)


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
    The key of its spec names a cache folder, so other content there is damage, and is built again."""
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
        reasons = token_store.describe_skipped(sum((Counter(shard.skipped) for shard in shards), Counter[str]()))
        problem = f"it holds only {reasons}" if reasons else "it holds no document with text"
        raise InputError(f"data source {spec.corpus.name!r} is empty: {problem}")
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
        loss_mask=bool(table["skip"].any()) or any(shard.has_mask for shard in shards),
        classes=int(table["label"].max()) + 1,
        shards=tuple(shards),
    )
    write_json_atomically(out / "manifest.json", manifest.to_json())
    for path in [out / "plan.json", *out.glob("*.done"), *out.glob("*.tmp")]:
        path.unlink(missing_ok=True)
    return manifest
