"""The `motet` command. Every subcommand loads what it needs when it is called, so that help is quick."""

import sys
from typing import Annotated, Any

from typer import Exit, Option, Typer, echo

import motet
from motet.cli.checkpoint import checkpoint_app
from motet.cli.collectives.collectives_commands import collectives_app
from motet.cli.data import data_app
from motet.cli.environment_variables import read_environment
from motet.cli.generate import generate_command
from motet.cli.job_arguments import CommandGroup, JobCommand
from motet.cli.output import log
from motet.cli.plan.plan_commands import plan_app
from motet.cli.show.show_commands import show_app
from motet.cli.train import train_command
from motet.cli.verify import verify_command
from motet.core.errors import InputError, MotetError, OutputClosedError, is_out_of_memory
from motet.core.units import format_bytes

_EXAMPLES = """\b
Examples:
  motet train                                      # the job `tiny` on two CPU ranks
  motet plan llama3-8b --cluster h100 --gpus 8     # which layouts fit, and how fast they are
"""


class RootGroup(CommandGroup):
    """All commands, in the order in which a job needs them."""

    def list_commands(self, ctx: Any) -> list[str]:
        return sorted(
            self.commands,
            key=("train", "plan", "verify", "show", "collectives", "data", "checkpoint", "generate").index,
        )


app = Typer(
    cls=RootGroup,
    epilog=_EXAMPLES,
    name="motet",
    no_args_is_help=True,
    add_completion=False,
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)


def _version(wanted: bool) -> None:
    if wanted:
        echo(f"motet {motet.__version__}")
        raise Exit


_VERSION = Option("--version", callback=_version, is_eager=True, help="Print the version, and stop.")


@app.callback()
def root(*, version: Annotated[bool, _VERSION] = False) -> None:
    """Train large language models on any number of devices."""


app.command("train", cls=JobCommand)(train_command)
app.command("verify", cls=JobCommand)(verify_command)
app.command("generate")(generate_command)
app.add_typer(checkpoint_app, name="checkpoint")
app.add_typer(collectives_app, name="collectives")
app.add_typer(data_app, name="data")
app.add_typer(plan_app, name="plan")
app.add_typer(show_app, name="show")


def main() -> None:
    """Run a command. An error that a user can fix is one sentence and an exit code; others keep their traceback."""
    try:
        app(prog_name="motet")
    except OutputClosedError as error:
        sys.exit(error.exit_code)
    except SystemExit as error:
        # typer ends with 1, which is for a defect, if nobody reads its help.
        is_closed = error.code == 1 and "PacifyFlushWrapper" in type(sys.stdout).__name__
        sys.exit(OutputClosedError.exit_code if is_closed else error.code)
    except MotetError as error:
        # Ranks often fail alike: the first one on each machine reports it.
        environment = read_environment()
        if environment.get("LOCAL_RANK", environment.get("SLURM_LOCALID", "0")) == "0":
            log(f"motet: {error}")
        sys.exit(error.exit_code)
    except (MemoryError, RuntimeError) as error:
        if not is_out_of_memory(error):
            raise
        error.__traceback__ = None  # Its frames hold memory that the message needs
        from motet.cluster.host_limits import read_memory_limits  # Commands start quicker without it

        limit = min(read_memory_limits(), key=lambda each: each.total_bytes)
        log(
            f"motet: this command needs more memory than it gets: {limit.name} {format_bytes(limit.total_bytes)}; end "
            "other processes, raise the limit, or take a larger machine"
        )
        sys.exit(InputError.exit_code)
