"""Arguments of commands: jobs, configs of Hugging Face, and sizes such as 64MiB.

The job that a command names: a TOML file, a built-in job, or one that trains the model of a Hugging Face config.

Options that commands share, and sizes and counts that people type: `64MiB`, `1KiB..1GiB`, `2..64`, `4x4`.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable
from difflib import get_close_matches
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from typer import Argument, Option
from typer.core import TyperCommand, TyperGroup

from motet.cli.output import log
from motet.collectives.algorithms import collective_names
from motet.core.config_loading import did_you_mean, keys_named
from motet.core.errors import InputError, check_input
from motet.core.trace import log_if_slow
from motet.models.hf.hf_config import read_config, settings_from_config
from motet.models.settings import EncoderDecoderSettings, EncoderSettings
from motet.parallel.layout import sizes_in_words
from motet.train.job import Job, builtin_jobs, is_existing_file, load_job, overridden_job

if TYPE_CHECKING:
    from motet.models.spec.model_spec import ModelSpec

_CONTEXT_KEYS = ("max_position_embeddings", "n_positions", "max_seq_len", "seq_length")
_DEFAULT_CONTEXT = 2048  # The context where a config names none


class CommandGroup(TyperGroup):
    """A group that suggests a command in place of one that it does not have."""

    def resolve_command(self, ctx: Any, args: list[str]) -> Any:
        word = args[0]
        if word not in self.commands and not word.startswith("-"):
            raise InputError(f"{ctx.command_path} has no command {word!r}; {_command_hint(word, self.commands)}")
        return super().resolve_command(ctx, args)

    def format_commands(self, ctx: Any, formatter: Any) -> None:
        """Each command with its first sentence; click would cut it at the end of the line."""
        commands = {name: self.commands[name] for name in self.list_commands(ctx)}
        with formatter.section("Commands"):
            formatter.write_dl([(name, _first_sentence(command)) for name, command in commands.items()])


def _first_sentence(command: Any) -> str:
    return re.split(r"(?<=\.) ", " ".join((command.help or "").split()))[0]


def _command_hint(word: str, commands: Iterable[str]) -> str:
    collective = get_close_matches(word.lower().replace("_", "-"), collective_names(), n=1, cutoff=0.8)
    if collective:
        return f"write `motet show collective {collective[0]}`"
    if word in builtin_jobs() or is_existing_file(word):
        return f"write `motet train {word}`"
    return did_you_mean(word, commands, cutoff=0.7) or f"its commands are {', '.join(commands)}"


class JobCommand(TyperCommand):
    """A command with a JOB, which says how to write a setting of the job that was typed as an option."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        options = {name for param in self.get_params(ctx) for name in (*param.opts, *param.secondary_opts)}
        for index, word in enumerate(args):
            name, equals, value = word.partition("=")
            if name == "--":
                break
            if name.startswith("--") and name not in options:
                value = value if equals or args[index + 1 :][:1] in ([], ["--"]) else args[index + 1]
                raise InputError(f"{ctx.command_path} has no option {name}; {_option_hint(name, value, options)}")
        return super().parse_args(ctx, args)


def _option_hint(option: str, value: str, options: set[str]) -> str:
    """The option or the setting of a job that was meant."""
    if near := did_you_mean(option, options, cutoff=0.75):
        return near
    if option == "--layout":
        words = (f"layout.{word}" for word in (value.split() if "=" in value else sizes_in_words(value)))
        return f"write the layout as settings: {' '.join(words)}"
    value = value if re.fullmatch(r"[0-9.e+-]+", value) else "VALUE"
    keys = [key for key in keys_named(Job, option) if key not in Job.model_fields][:2]
    hint = " or ".join(f"{key}={value}" for key in keys) or "such as run.steps=100"
    return f"settings of the job are written without dashes: {hint}"


def is_config(source: str) -> bool:
    """Whether a word of the command line names a config and not a job."""
    path = source.removeprefix("hf:")
    return source.startswith("hf:") or path.endswith(".json") or Path(path, "config.json").is_file()


def load_job_or_config(source: str, overrides: list[str]) -> Job:
    """Load a job, or make one in bf16 that trains the model of a config with its usual objective."""
    if not is_config(source):
        return load_job(source, overrides)
    path = Path(source.removeprefix("hf:"))
    objective, context = _objective_and_context(read_config(path))
    folder = path.parent if path.name.endswith(".json") else path
    tree: dict[str, Any] = {
        "name": re.sub(r"[^A-Za-z0-9._-]|^[._-]+", "", folder.resolve().name) or "config",
        "model": {"family": "module", "factory": f"hf:{path}"},
        "data": {"objective": objective, "sequence_length": context},
        "precision": {"recipe": "bf16"},
        "run": {"steps": 100},
    }
    if Path(folder, "tokenizer.json").is_file():
        tree["data"]["tokenizer"] = str(folder)
    return overridden_job(tree, overrides, source)


def _objective_and_context(config: dict[str, Any]) -> tuple[str, int]:
    try:
        settings = settings_from_config(config)
    except InputError:  # The family is unknown, or a size is wrong, which the reader of sizes reports
        lengths = (config.get(key) for key in _CONTEXT_KEYS)
        context = next((length for length in lengths if isinstance(length, int) and length > 0), _DEFAULT_CONTEXT)
        return ("spans" if config.get("is_encoder_decoder") else "causal"), context
    if isinstance(settings, EncoderSettings):
        return settings.head, settings.context
    return ("spans" if isinstance(settings, EncoderDecoderSettings) else "causal"), settings.context


def trace_job(job: Job) -> ModelSpec:
    """The spec of a job's model, whatever it is. This needs torch."""
    from motet.models.trace.model_trace import trace_model

    with log_if_slow(log, "tracing a forward of the model without memory ..."):
        return trace_model(job.model, job.precision.resolved.compute, objective=job.data.objective)


MAX_RANKS = 1024  # A ring of 1024 ranks has two million transfers
_DECIMAL = {"": 1, "b": 1, "kb": 10**3, "mb": 10**6, "gb": 10**9, "tb": 10**12}
_UNITS = {**_DECIMAL, "kib": 2**10, "mib": 2**20, "gib": 2**30, "tib": 2**40}

_JOB_HELP = "A TOML file, a built-in job (tiny when not given) or hf:FOLDER, and settings to replace."
JobWords = Annotated[list[str] | None, Argument(metavar="[JOB] [SECTION.KEY=VALUE]...", help=_JOB_HELP)]
Overrides = Annotated[
    list[str] | None, Argument(metavar="[SECTION.KEY=VALUE]...", help="Settings of the job to replace.")
]
Json = Annotated[bool, Option("--json", help="Print JSON.")]
JsonAndProgress = Annotated[bool, Option("--json", help="Print JSON; progress goes to stderr.")]


def integer_option(name: str, minimum: int, maximum: int | None = None) -> Callable[[int | None], int | None]:
    """Make the typer callback that checks the limits of an option."""

    def check(value: int | None) -> int | None:
        is_valid = value is None or minimum <= value <= (value if maximum is None else maximum)
        check_input(is_valid, f"{name} {value}: give {minimum} {'or more' if maximum is None else f'to {maximum}'}")
        return value

    return check


def parse_bytes(text: str) -> int:
    """Parse a number of bytes: 64MiB, 1.5 GB, 4096 or 1e6."""
    match = re.fullmatch(r"([0-9]*\.?[0-9]+(?:e\+?[0-9]{1,2})?)\s*([a-z]*)", text.strip().lower())
    shown_text = repr(text if len(text) <= 40 else f"{text[:40]}...")
    if not match or match[2] not in _UNITS:
        raise InputError(f"size {shown_text} is not a number of bytes; write it as 64MiB, 1e6 or 4096")
    count = float(match[1]) * _UNITS[match[2]]
    size_text = "more than 2^60" if count > 2**60 else f"{count:.4g}"
    check_input(0.5 < count <= 2**60, f"size {shown_text} is {size_text} bytes; give 1 to 2^60")
    return round(count)


def parse_size_range(text: str) -> list[int]:
    """Parse `1KiB..1GiB` (steps of a factor of four), `1KiB,1MiB` or `64MiB`."""
    first, dots, last = text.partition("..")
    if not dots:
        return sorted({parse_bytes(part) for part in text.split(",")})
    low, high = parse_bytes(first), parse_bytes(last)
    check_input(low < high, f"sizes {text}: the second is not larger than the first; give a larger one")
    sizes = [low]
    while sizes[-1] * 4 < high:
        sizes.append(sizes[-1] * 4)
    return [*sizes, high]


def parse_rank_counts(text: str) -> list[int]:
    """Parse numbers of ranks: `2..64`, `4,8`, `7` or a mixture."""
    rank_counts: set[int] = set()
    for part in text.split(","):
        ends = [parse_integer("ranks", end) for end in part.split("..", 1)]
        limits = f"give 2 to {MAX_RANKS}, the smaller number first, as in 2..64 or 4,8"
        check_input(2 <= ends[0] <= ends[-1] <= MAX_RANKS, f"ranks {part}: {limits}")
        rank_counts.update(range(ends[0], ends[-1] + 1))
    return sorted(rank_counts)


def parse_dims(text: str) -> tuple[int, ...]:
    """Parse lengths of a torus: `4x4`."""
    return tuple(parse_integer("dims", part) for part in text.split("x"))


def parse_integer(name: str, text: str) -> int:
    """Parse a whole number of at most nine digits."""
    example = f"write it as in {name}={'4x4' if name == 'dims' else 4}"
    check_input(re.fullmatch(r"[0-9]{1,9}", text.strip()), f"{name}: {text!r} is not a whole number; {example}")
    return int(text)
