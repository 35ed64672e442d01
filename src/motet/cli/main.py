"""The `motet` command. Every subcommand loads what it needs when it is called, so that help is quick."""

import sys
from typing import Annotated

import typer

import motet
from motet.cli import data
from motet.cli.collectives import list_algorithms
from motet.cli.show import model
from motet.cli.train import train
from motet.cli.verify import verify

app = typer.Typer(
    name="motet",
    no_args_is_help=True,
    add_completion=False,
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)


def _version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"motet {motet.__version__}")
        raise typer.Exit


@app.callback()
def root(
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Print the version, and stop.")
    ] = False,
) -> None:
    """Train large language models on any number of devices."""


app.command()(train)
app.command()(verify)
app.add_typer(list_algorithms.app, name="collectives")
app.add_typer(data.app, name="data")
app.add_typer(model.app, name="show")


def main() -> None:
    """Run a command. What a user can mend is one sentence and an exit code; anything else keeps its traceback."""
    from motet.core.errors import MotetError

    try:
        app()
    except MotetError as error:
        from motet.cli.environment import read_environment
        from motet.monitor.console import stderr_console

        # Of many ranks with the same complaint, one on each machine tells it.
        environment = read_environment()
        if environment.get("LOCAL_RANK", environment.get("SLURM_LOCALID", "0")) == "0":
            stderr_console().print(f"motet: {error}", highlight=False)
        sys.exit(error.exit_code)
