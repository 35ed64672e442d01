"""`motet verify`: a test that layouts compute the same numbers as one device."""

from __future__ import annotations

import sys
from contextlib import nullcontext, redirect_stdout
from typing import TYPE_CHECKING, Annotated

from typer import Exit, Option

from motet.cli.environment_variables import read_environment
from motet.cli.job_arguments import JobWords, JsonAndProgress, load_job_or_config
from motet.cli.output import log
from motet.core.errors import check_input
from motet.monitor.stdout_stderr import print_json, stderr_console, stdout_console

if TYPE_CHECKING:
    from motet.parity.full_vocabulary import HeadVerdict
    from motet.parity.layout_verdict import LayoutVerdict
    from motet.train.job import Job

DEFAULT_RANKS = 4


def verify_command(
    *,
    words: JobWords = None,
    layout: Annotated[
        list[str] | None, Option(help='A layout such as "dp=2 zero=1"; may be given several times.')
    ] = None,
    everything: Annotated[bool, Option("--all", help="All layouts for up to --ranks ranks.")] = False,
    ranks: Annotated[
        int | None,
        Option(min=1, help=f"Ranks of layouts that do not say dp, and the most with --all; {DEFAULT_RANKS}."),
    ] = None,
    verbose: Annotated[
        bool, Option("--verbose", help="Say which tensors differ most, and which are not compared.")
    ] = False,
    json: JsonAndProgress = False,
) -> None:
    """Compare layouts with one device in float64, on a small version of the job; say where they begin to differ."""
    from motet.parallel.layout import with_default_ranks
    from motet.train.job import split_job_and_overrides

    check_input(not layout or not everything, "--all and --layout: --all takes all layouts; leave one of the two out")
    name, settings = split_job_and_overrides(words or [])
    layouts = [with_default_ranks(text, ranks or DEFAULT_RANKS) for text in layout or []]
    job = load_job_or_config(name or "tiny", settings)
    from motet.parity.candidate_layouts import layout_text, layouts_up_to

    if everything:
        layouts = layouts_up_to(ranks or DEFAULT_RANKS)
    elif not layout:
        layouts = [with_default_ranks(layout_text(job.layout), ranks or max(2, job.run.ranks))]
    raise Exit(_verify_layouts(job, layouts, json, leaves_out=everything, verbose=verbose))


def _verify_layouts(job: Job, layouts: list[str], json: bool, *, leaves_out: bool, verbose: bool) -> int:
    """Layouts that the job cannot have are left out, or fail without ending the others."""
    from motet.parity.full_vocabulary import HeadVerdict
    from motet.parity.layout_verdict import LayoutVerdict, exit_code_for, failed_verdict
    from motet.parity.verify_job import (
        make_verification_plans,
        refused_layouts,
        verify_full_heads,
        verify_job_layouts,
    )
    from motet.train.launch.failures import STOP_SIGNALS, STOPPED_EXIT_CODE, handle_signals, interrupt

    verdicts: list[LayoutVerdict] = []
    heads: list[HeadVerdict] = []

    def show(verdict: LayoutVerdict | HeadVerdict) -> None:
        if isinstance(verdict, HeadVerdict):
            heads.append(verdict)
        else:
            verdicts.append(verdict)
        details = verdict.details() if verbose and isinstance(verdict, LayoutVerdict) else []
        lines = [str(verdict), *(f"       {line}" for line in details)]
        (stderr_console() if json else stdout_console()).print("\n".join(lines), highlight=False, soft_wrap=True)

    try:
        with (
            redirect_stdout(sys.stderr) if json else nullcontext(),
            handle_signals(interrupt, *STOP_SIGNALS),
        ):
            refused = refused_layouts(job, layouts) if len(layouts) > 1 else {}
            for layout, error in refused.items():
                reason = str(error).removeprefix(f"layout {layout!r}: ")
                if leaves_out:
                    log(f"left out: {layout}: {reason}")
                else:
                    show(failed_verdict(layout, reason, error.exit_code))
            layouts = [layout for layout in layouts if layout not in refused]
            plans = make_verification_plans(job, layouts, log)
            for plan in plans:
                verify_job_layouts(plan, read_environment(), log=log, on_verdict=show)
            verify_full_heads(plans, log=log, on_verdict=show)  # After the ranks, whose memory is free again
        code = exit_code_for([*verdicts, *heads])
    except KeyboardInterrupt:
        log(f"stopped; {len(verdicts)} of {len(layouts)} layouts were verified")
        code = STOPPED_EXIT_CODE
    if json:
        print_json({"layouts": [each.as_json() for each in verdicts], "heads": [each.as_json() for each in heads]})
    return code
