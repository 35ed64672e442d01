"""`motet data`: build a corpus into a folder of tokens, and look into such a folder."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import groupby
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, get_args

from typer import Argument, Option, Typer

from motet.cli.job_arguments import CommandGroup
from motet.cli.output import print_lines, show_progress, table_lines
from motet.core.errors import InputError, check_input
from motet.core.units import format_count
from motet.monitor.stdout_stderr import print_json, stdout_console

if TYPE_CHECKING:
    from motet.data.corpus.token_store import TokenStore
    from motet.data.settings import DataSettings, DataSourceSettings

data_app = Typer(cls=CommandGroup, help="Build corpora into tokens, and look into them.", no_args_is_help=True)

_OPTIONS = ("objective", "text_field", "prompt_field", "answer_field", "messages_field", "label_field")
_SHOWN_TOKENS, _SHOWN_MASKED_TOKENS = 100, 1000  # A conversation may begin with a long prompt


@data_app.command("build")
def build_command(
    *,
    source: Annotated[str, Argument(help="`stdlib`, a file, folder or pattern of text or records, or hf:NAME.")],
    out: Annotated[Path, Option(help="The folder to build; finished parts in it are kept.")],
    options: Annotated[
        list[str] | None, Argument(metavar="KEY=VALUE", help=f"{', '.join(_OPTIONS)}: as in a job's [data].")
    ] = None,
    tokenizer: Annotated[str, Option(help="bpe:SIZE, `bytes`, or a tokenizer.json or its folder.")] = "bpe:4096",
    workers: Annotated[int | None, Option(min=1, help="Processes; all cores when not given.")] = None,
    json: Annotated[bool, Option("--json", help="Print the manifest as JSON; progress goes to stderr.")] = False,
) -> None:
    """Turn text into tokens. The same command continues an interrupted build."""
    from motet.data.corpus.prepare import build_corpus_folder
    from motet.data.corpus.token_store import describe_skipped

    fields, settings = _parse_settings(source, options or [], tokenizer, workers=workers)
    with show_progress() as progress:
        manifest = build_corpus_folder(fields, settings, out, progress=progress)
    if json:
        print_json(manifest.to_json())
    else:
        size = f"{format_count(manifest.documents)} documents, {format_count(manifest.tokens)} tokens"
        left_out = describe_skipped(manifest.skipped)
        stdout_console().print(
            f"{out}: {size} of a vocabulary of {manifest.vocab_size}; corpus hash {manifest.corpus_hash}"
            + (f"; left out {left_out}" if left_out else "")
        )


@data_app.command("show")
def show_command(
    *,
    folder: Annotated[Path, Argument(help="A folder that `motet data build` made.")],
    verify: Annotated[bool, Option(help="Read everything and compare checksums.")] = False,
    json: Annotated[bool, Option("--json", help="Print the manifest and the sample as JSON.")] = False,
) -> None:
    """Print the manifest of a built folder, and the start of its first document as text, with the tokens that count in
    the loss as {+text+} where some do not."""
    from rich.text import Text

    from motet.data.corpus.prepare import load_corpus_tokenizer
    from motet.data.corpus.token_store import check_undamaged, open_built_corpus, read_corpus_manifest

    manifest = read_corpus_manifest(folder)
    check_undamaged(folder, manifest, checksums=verify)
    store = open_built_corpus(folder)
    shown = min(_SHOWN_MASKED_TOKENS if store.loss_mask else _SHOWN_TOKENS, int(store.documents["length"][0]))
    ids, tokenizer = store.read(0, shown).tolist(), load_corpus_tokenizer(folder).tokenizer
    parts = [(is_target, tokenizer.decode(part)) for is_target, part in _split_by_target(store, ids)]
    if json:
        masked = [{"text": text, "target": is_target} for is_target, text in parts]
        shown_parts = {"sample_parts": masked} if store.loss_mask else {}
        print_json({**manifest.to_json(), "sample": tokenizer.decode(ids), **shown_parts})
        return
    facts = {**manifest.to_json(), "shards": len(manifest.shards)}
    print_lines(*table_lines(((name, str(value)) for name, value in facts.items()), right=[0]))
    screen = stdout_console()
    legend = "; those in {+ +} count in the loss" if store.loss_mask else ""
    screen.print(f"\nThe first {len(ids)} tokens of the first document{legend}:\n", style="bold", markup=False)
    sample = Text()
    for is_target, text in parts:
        marked = is_target and store.loss_mask
        sample.append(f"{{+{text}+}}" if marked else text, "bold green" if marked else "")
    screen.print(sample, highlight=False)


def _split_by_target(store: TokenStore, ids: list[int]) -> Iterator[tuple[bool, list[int]]]:
    """Runs of the first tokens of the first document, which are all targets or none."""
    counts = store.read_targets(0, len(ids)).tolist()
    first_target = int(store.documents["skip"][0])
    for is_target, run in groupby(range(len(ids)), lambda i: i >= first_target and counts[i]):
        yield is_target, [ids[i] for i in run]


def _parse_settings(
    source: str, options: list[str], tokenizer: str, *, workers: int | None
) -> tuple[DataSourceSettings, DataSettings]:
    from pydantic import ValidationError

    from motet.core.config_loading import did_you_mean
    from motet.data.settings import DataSettings, DataSourceSettings, Objective

    values = {"objective": "causal"}
    for option in options:
        key, equals, value = option.partition("=")
        hint = did_you_mean(key, _OPTIONS) or f"known are {', '.join(_OPTIONS)}"
        check_input(equals and key in _OPTIONS, f"option {option!r} is not KEY=VALUE with a known key; {hint}")
        values[key] = value
    objective = values.pop("objective")
    known = get_args(Objective)
    check_input(objective in known, f"objective={objective} is unknown; give one of {', '.join(known)}")
    settings = {"objective": objective, "tokenizer": tokenizer, "workers": workers}
    try:
        return DataSourceSettings.model_validate({"source": source, **values}), DataSettings.model_validate(settings)
    except ValidationError as error:
        detail = error.errors()[0]
        raise InputError(f"{detail['loc'][0]} = {detail['input']!r}: {detail['msg']}") from None
