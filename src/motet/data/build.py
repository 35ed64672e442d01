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
from motet.data.corpus import Corpus
from motet.data.settings import SourceSettings
from motet.data.shards import Plan, build_shard, read_plan, shard_done
from motet.data.store import (
    DOCUMENT,
    VERSION,
    Manifest,
    ShardEntry,
    clear,
    find_damage,
    is_built,
    is_ours,
    read_manifest,
    write_json,
    writing,
)
from motet.data.tokens import Tokenizer
from motet.data.worker import build_in_processes, wait_for_orphans

Progress = Callable[[str, int, int], None]
"""Called with what is being done, and how many bytes of how many are."""

_INLINE = 1 << 20
"""Bytes of text below which starting a process takes longer than the work."""


@dataclass(frozen=True)
class Recipe:
    """All that decides the content of a built folder."""

    corpus: Corpus
    fields: SourceSettings
    labelled: bool
    tokenizer: Tokenizer
    sentinels: int

    @property
    def key(self) -> str:
        """A name for this content."""
        names = self.fields.model_dump(exclude={"weight", "source"})
        parts = [VERSION, self.corpus.identity, names, self.labelled, self.tokenizer.fingerprint, self.sentinels]
        return hashlib.blake2b(json.dumps(parts).encode(), digest_size=12).hexdigest()

    @property
    def dtype(self) -> str:
        return "uint16" if self.tokenizer.vocab_size <= 1 << 16 else "uint32"


def build(recipe: Recipe, out: Path, workers: int, progress: Progress, owned: bool = False) -> Manifest:
    """The built folder, new or continued; one that is finished and whole is left as it is.

    An `owned` folder is named by its recipe, in a cache: whatever else is found in it is damage, and made again.
    """
    with writing(out):
        out.parent.mkdir(parents=True, exist_ok=True)
        # Whoever comes second waits for the first and finds the work done.
        with filelock.FileLock(out.parent / f".{out.name}.lock"):
            if out.is_dir():
                wait_for_orphans(out)
            try:
                finished = _finished(recipe, out)
            except InputError:
                if not owned:
                    raise
                clear(out)
                finished = None
            return finished or _build(recipe, out, workers, progress)


def refuse_foreign(out: Path) -> None:
    """Before anything is trained or made; `build` looks closer, while nobody else is at work in the folder."""
    if out.exists() and not out.is_dir():
        raise InputError(f"{out} is a file; choose a folder")
    names = sorted(path.name for path in out.iterdir()) if out.is_dir() else []
    if names and not any(is_ours(name) for name in names):
        raise InputError(f"{out} is not empty and holds no corpus (but {names[0]!r}); choose another folder")


def _finished(recipe: Recipe, out: Path) -> Manifest | None:
    """The manifest of an earlier build of the same; a damaged one is cleared away, anything else is refused."""
    if out.exists() and not out.is_dir():
        raise InputError(f"{out} is a file; choose a folder")
    if is_built(out):
        manifest = read_manifest(out)
        if manifest.recipe != recipe.key:
            raise InputError(
                f"{out} holds another corpus (built from {manifest.source!r}, or from other files or settings than "
                "now); choose another folder or delete it"
            )
        if find_damage(out, manifest, checksums=True) is None:
            return manifest
        clear(out)
    elif out.is_dir() and not (out / "plan.json").is_file():
        strange = sorted(path.name for path in out.iterdir() if path.name != "plan.json.tmp")
        if strange:
            raise InputError(f"{out} is not empty and holds no corpus (but {strange[0]!r}); choose another folder")
    return None


def _build(recipe: Recipe, out: Path, workers: int, progress: Progress) -> Manifest:
    plan = _plan(recipe, out)
    done = {number for number in range(len(plan.shards)) if shard_done(out, number, verify=True)}
    missing = [number for number in range(len(plan.shards)) if number not in done]
    progress("tokenising", kept := sum(plan.size(number) for number in done), recipe.corpus.size)

    def advance(read: int) -> None:
        nonlocal kept
        kept += read
        progress("tokenising", min(kept, recipe.corpus.size), recipe.corpus.size)

    if recipe.corpus.size < _INLINE:
        for number in missing:
            build_shard(out, plan, number, recipe.tokenizer, advance)
    elif missing:
        build_in_processes(out, missing, workers, advance)
    return _finish(recipe, plan, out)


def _plan(recipe: Recipe, out: Path) -> Plan:
    """The plan of an unfinished build when it is the same as ours; else the folder starts anew."""
    own_file = not recipe.tokenizer.plain_bytes
    plan = Plan(
        recipe=recipe.key,
        fields=recipe.fields,
        labelled=recipe.labelled,
        tokenizer="tokenizer.json" if own_file else "bytes",
        sentinels=recipe.sentinels,
        dtype=recipe.dtype,
        shards=recipe.corpus.shards(),
    )
    earlier = read_plan(out)
    if earlier is None or earlier.recipe != plan.recipe:
        out.mkdir(exist_ok=True)
        clear(out)
        write_json(out / "plan.json", plan.to_json())
    # Written anew even when it is there: the build may have been broken off in the middle of it.
    if own_file:
        recipe.tokenizer.save(out)
    return plan


def _finish(recipe: Recipe, plan: Plan, out: Path) -> Manifest:
    """Sum up the shards, write the manifest, and clear away what only an unfinished build needs."""
    numbers = range(len(plan.shards))
    entries = [entry for number in numbers if (entry := shard_done(out, number, verify=False)) is not None]
    assert len(entries) == len(plan.shards), "every shard was just built"
    digest, classes, loss_mask = hashlib.blake2b(digest_size=16), 0, False
    for number in numbers:
        table = np.fromfile(out / f"{number:05}.docs", dtype=DOCUMENT)
        digest.update(table["hash"].tobytes())
        classes = max(classes, int(table["label"].max(initial=-1)) + 1)
        loss_mask = loss_mask or bool(table["skip"].any())
    if not any(entry.documents for entry in entries):
        clear(out)
        out.rmdir()
        raise InputError(f"data source {recipe.corpus.name!r} is empty: it holds no document with text")
    manifest = Manifest(
        source=recipe.corpus.name,
        recipe=plan.recipe,
        tokenizer=plan.tokenizer,
        sentinels=plan.sentinels,
        vocab_size=recipe.tokenizer.vocab_size,
        dtype=plan.dtype,
        documents=sum(entry.documents for entry in entries),
        tokens=sum(entry.tokens for entry in entries),
        corpus_hash=digest.hexdigest(),
        loss_mask=loss_mask,
        classes=classes,
        shards=tuple(ShardEntry(**asdict(entry)) for entry in entries),
    )
    write_json(out / "manifest.json", manifest.to_json())
    for path in [out / "plan.json", *out.glob("*.done"), *out.glob("*.tmp")]:
        path.unlink(missing_ok=True)
    return manifest
