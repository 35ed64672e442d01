"""A parameter server, from outside: a job is trained with it for real, and what it leaves is compared."""

import os
import tempfile
from collections.abc import Mapping
from contextlib import nullcontext
from dataclasses import replace
from functools import cached_property
from pathlib import Path

import torch

from motet.checkpoint.load import load_checkpoint
from motet.checkpoint.manifest import is_compression_state, read_manifest
from motet.core.errors import RankFailedError
from motet.monitor.events import EVENTS_FILE, StepDone, read_events
from motet.train.job import Job, with_overrides
from motet.train.launch.entry_points import SupervisorIO, TrainRequest, supervise_local_ranks
from motet.train.launch.supervisor import LaunchExitStatus
from motet.verify.causes import Case, cause
from motet.verify.compare import Reference, reference_of
from motet.verify.fold import folded_part
from motet.verify.layouts import Candidate
from motet.verify.record import Recorder, Seen
from motet.verify.runs import Referred, state_file
from motet.verify.verdict import Found, Verdict, failed, judge, wrong

TRAINED = "of a whole run"


class Servers:
    """Layouts with servers, against the same run on one device."""

    def __init__(self, job: Job, referred: Referred, environment: Mapping[str, str]) -> None:
        self._job = job
        self._referred = referred
        self._environment = environment

    def verdict(self, candidate: Candidate) -> Verdict:
        """Its `first_difference` is in what the run leaves after a step: numbers, moments, parameters."""
        seen, ended = _trained(candidate.job, candidate.world, self._environment)
        if ended.message:
            return failed(candidate.text, f"{ended.message} (of the job made small)", ended.exit_code)
        worst, first, unjudged = judge(
            lambda _, step: self._references[step],
            [(TRAINED, step) for step in range(len(self._references))],
            lambda _, step: [seen[step]],
        )
        if first is None:
            return Verdict(candidate.text, True, worst.difference.relative, str(worst), unjudged=unjudged)
        found = wrong(candidate.text, worst, first, lambda: self._cause(candidate, seen[first.step], first))
        return replace(found, rank=None)  # the run as a whole

    @cached_property
    def _references(self) -> list[Reference]:
        """The same run on one device; how far rounding may carry it is known from the perturbed references."""
        seen, ended = _trained(self._job, 1, self._environment, folds=False)
        if ended.message:
            raise RankFailedError(f"one device: {ended.message} (of the job made small)")
        rates = [reference.learning_rate for reference in self._referred.single]
        noise = [dict(free.noise) for free in self._referred.free]
        operations = max(whole.seen.operations for whole in self._referred.free[0].wholes.values())
        return [
            Reference(reference_of(each._replace(operations=operations) for each in one), rate, known)
            for one, rate, known in zip(seen, rates, noise, strict=True)
        ]

    def _cause(self, candidate: Candidate, seen: list[Seen], found: Found) -> str:
        if found.difference.what:
            return found.difference.what
        site = found.difference.site
        value = next(each.value for each in seen if (each.kind, each.name) == site)
        expected = folded_part(self._references[found.step].wholes[site].value.reshape(-1), 0)
        if found.step:
            before = self._references[found.step - 1].tensor(site)
        else:
            before = self._referred.free[0].tensor(("starting parameter", site[1].removeprefix("master/")))
        sizes = {"workers": float(candidate.world), "servers": float(candidate.job.layout.server.count)}
        sizes["micro-batches of a worker"] = float(candidate.job.layout.microbatches)
        own = None if before is None or before.ndim == 0 else folded_part(before.reshape(-1), 0)
        return cause(Case(value.reshape(-1), expected, None, sizes, before=own))


def _trained(
    job: Job, ranks: int, environment: Mapping[str, str], folds: bool = True
) -> tuple[list[list[Seen]], LaunchExitStatus]:
    """What a run leaves after each step, if it comes to its end."""
    with tempfile.TemporaryDirectory(prefix="motet-verify-run-") as name, Path(os.devnull).open("wb") as quiet:
        folder = Path(name) / "run"
        settings = [
            f"run.folder={folder}",
            f"run.ranks={ranks}",
            "checkpoint.every=1",
            "monitor.tensorboard=false",
            "run.device=cpu",
        ]
        asked = with_overrides(job, settings, "verify")
        outside = SupervisorIO(environment, lambda text: None, lambda: nullcontext(lambda *_: None), quiet.fileno())
        path, ended = supervise_local_ranks(TrainRequest(asked, None, ["motet", "verify"]), outside)
        ended.raise_if_stopped()
        if ended.message:
            return [], ended
        steps = [event for event in read_events(path / EVENTS_FILE) if isinstance(event, StepDone)]
        return [_left(path, event, Recorder(folds=folds)) for event in steps], ended


def _left(path: Path, event: StepDone, recorder: Recorder) -> list[Seen]:
    recorder.add_whole("sum", "target tokens", event.target_tokens)
    recorder.add_whole("sum", "mean loss", event.loss)
    recorder.add_whole("norm", "gradient norm", event.grad_norm or 0.0)
    where = state_file(path, event.step)
    manifest = read_manifest(where)
    named = {name: shape for name, shape in manifest.shapes.items() if not is_compression_state(name)}
    state = {name: torch.empty(shape, dtype=getattr(torch, manifest.dtypes[name])) for name, shape in named.items()}
    load_checkpoint(where, state, None)
    for name in sorted(state, key=lambda name: name.startswith("master/")):
        recorder.add_piece("state", name, state[name])
    return recorder.seen
