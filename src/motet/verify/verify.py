"""Layouts against one device: the reference here, then the ranks of each layout, and a verdict on what they have."""

import math
import shutil
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from threading import Event

from motet.core.errors import InputError
from motet.core.toml_writer import to_toml
from motet.train.job import Job
from motet.train.launch.preflight import check_job
from motet.train.launch.run_folder import JOB_FILE
from motet.train.launch.supervisor import LaunchExitStatus, LaunchSpec, launch_ranks, rank_environment
from motet.verify.explain import verdict_on
from motet.verify.layouts import Candidate, laid_out
from motet.verify.native import Native, in_own_precision, refer_native
from motet.verify.rank import NATIVE, done_file, native_folder, read_seen, walked_by
from motet.verify.runs import Referred, one_thread, refer
from motet.verify.served import Servers
from motet.verify.shares import WhatIf
from motet.verify.shrink import shrink
from motet.verify.trial import JobTrial
from motet.verify.verdict import Verdict, failed, of_one_device

STEPS = 3
POLL_S = 0.1
FEWEST_ROWS, MOST_ROWS = 8, 64
"""Of a batch; more only if a layout by itself needs more."""
WORK = "motet.verify.rank:layout_rank"
Tell = Callable[[str], None]
Show = Callable[[Verdict], None]
STDERR = 2


@dataclass(frozen=True)
class Subject:
    """A small job, and the layouts in which it is to compute what one device does."""

    job: Job
    """In float64."""
    candidates: Sequence[Candidate]
    native: Job
    """The same in its own precision."""


def subjects_of(job: Job, layouts: Sequence[str], tell: Tell) -> list[Subject]:
    """One for layouts that can cut a batch of few rows evenly, with those of few ranks first."""
    if job.outer.every is not None:
        raise InputError(
            f"outer.every = {job.outer.every}: replicas that train apart do not compute what one device does; leave it "
            "out, and verify how each replica is spread"
        )
    candidates = [laid_out(job, layout) for layout in layouts]
    for key in ("compress_gradients", "compress_parameters"):
        if (codec := getattr(job.communication, key)) is not None:
            tell(f"communication.{key} = {codec!r} loses bits by design and is left out here")
    return [_subject(job, some) for some in _grouped(sorted(candidates, key=lambda each: each.world))]


def possible(job: Job, layouts: Sequence[str], tell: Tell) -> list[str]:
    """Those that the job can have, and why it cannot have the others."""
    refused: dict[str, InputError] = {}
    for layout in layouts:
        try:
            subjects_of(job, [layout], lambda text: None)
        except InputError as error:
            refused[layout] = error
    if len(refused) == len(layouts):
        raise refused[layouts[-1]]
    for layout, why in refused.items():
        tell(f"left out: {layout}: {str(why).removeprefix(f'layout {layout!r}: ')}")
    return [layout for layout in layouts if layout not in refused]


def _grouped(candidates: Sequence[Candidate]) -> Iterator[list[Candidate]]:
    some: list[Candidate] = []
    for candidate in candidates:
        if some and _rows([each.parts for each in (*some, candidate)]) > MOST_ROWS:
            yield some
            some = []
        some.append(candidate)
    yield some


def _subject(job: Job, candidates: Sequence[Candidate]) -> Subject:
    """A job of the same structure that is small, with a batch that all layouts can cut evenly; or that none of several
    ranks can, where they need not."""
    small = shrink(job, _rows([candidate.parts for candidate in candidates]) + bool(job.run.reproducible), STEPS)
    fitting = [laid_out(small, candidate.text) for candidate in candidates]
    for candidate in fitting:
        check_job(candidate.job, candidate.world)
    return Subject(small, fitting, small.model_copy(update={"precision": job.precision}))


def _rows(parts: Sequence[int]) -> int:
    """As few as can be cut into any of these, with two or more in each, and eight or more in all."""
    unit = math.lcm(*parts)
    return unit * math.ceil(max(FEWEST_ROWS, 2 * max(parts)) / unit)


def verify(subject: Subject, environment: Mapping[str, str], tell: Tell, show: Show) -> list[Verdict]:
    """All verdicts; each is shown as it comes, those of few ranks first."""
    with tempfile.TemporaryDirectory(prefix="motet-verify-") as name:
        folder = Path(name)
        (folder / "logs").mkdir()
        start_s = time.perf_counter()
        referred, native = refer(JobTrial(_stored(subject.job, folder)), folder), None
        shown: list[Verdict] = []

        def found(verdict: Verdict) -> None:
            shown.append(verdict)
            show(verdict)

        if referred.differs is not None:
            for candidate in subject.candidates:
                found(of_one_device(candidate.text, *referred.differs))
            return shown
        if subject.native.precision.recipe != subject.job.precision.recipe or subject.job.run.reproducible:
            trial = JobTrial(_stored(subject.native, native_folder(folder)))
            native = refer_native(trial, native_folder(folder), referred.single[0].varying)
        tell(f"one device: {STEPS} steps, and again from perturbed parameters: {time.perf_counter() - start_s:.1f} s")
        runs = _Runs(referred, native, environment, tell, found)
        recorded = [candidate for candidate in subject.candidates if not candidate.job.layout.uses_server_processes]
        runs.judge(recorded)
        servers = Servers(subject.job, referred, environment)
        for candidate in subject.candidates:
            if candidate.job.layout.uses_server_processes:
                start_s = time.perf_counter()
                found(replace(servers.verdict(candidate), seconds=time.perf_counter() - start_s))
        return shown


def _stored(job: Job, folder: Path) -> Job:
    """For ranks to read."""
    folder.mkdir(exist_ok=True)
    tree = job.model_dump(exclude_none=True, exclude_unset=True)
    if job.optimizer.clip_norm is None:  # whose default is not None
        tree.setdefault("optimizer", {})["clip_norm"] = False
    (folder / JOB_FILE).write_text(to_toml(tree))
    return job


@dataclass(frozen=True)
class _Runs:
    """Of layouts, each on ranks of its own."""

    referred: Referred
    native: Native | None
    environment: Mapping[str, str]
    tell: Tell
    found: Show

    def judge(self, left: list[Candidate]) -> None:
        """Layouts that ranks do one after another, those with few ranks first."""
        while left:
            count, ended = self._run(left)
            ended.raise_if_stopped()
            left = left[count:]
            if left:  # the first that is left ended the others with it
                if ended.traceback:
                    self.tell(ended.traceback)
                self.found(failed(left.pop(0).text, ended.message or "its ranks ended", ended.exit_code))

    def _run(self, candidates: Sequence[Candidate]) -> tuple[int, LaunchExitStatus]:
        """How many came to their end; each is judged while the ranks do the next one."""
        folder = self.referred.folder
        for old in folder.glob("layout-*"):
            shutil.rmtree(old) if old.is_dir() else old.unlink()
        start = LaunchSpec(
            command=(
                sys.executable,
                "-m",
                "motet.cli.rank_main",
                WORK,
                str(folder),
                *(each.text for each in candidates),
            ),
            ranks=max(each.world for each in candidates),
            environment=rank_environment(self.environment, 1),
            log_folder=folder / "logs",
            stdout_fd=STDERR,
            stop_message="stopping",
        )
        over = Event()
        with ThreadPoolExecutor(1) as pool:  # not the ranks there: signals reach the main thread
            try:
                judging = pool.submit(self._judge_as_they_come, candidates, over)
                ended = launch_ranks(start, self.tell)
            finally:
                over.set()
            return judging.result(), ended

    def _judge_as_they_come(self, candidates: Sequence[Candidate], over: Event) -> int:
        before_s = time.perf_counter()
        for number, candidate in enumerate(candidates):
            while not (done := self._is_done(candidate, number)) and not over.wait(POLL_S):
                pass
            if not done and not self._is_done(candidate, number):  # it may have come with the end
                return number
            verdict = self._verdict(candidate, number)
            now_s = time.perf_counter()
            self.found(replace(verdict, seconds=now_s - before_s))
            before_s = now_s
            shutil.rmtree(self.referred.folder / f"layout-{number}")
            for file in self.referred.folder.glob(f"layout-{number}-*-rank-*.pt"):
                file.unlink()
        return len(candidates)

    def _is_done(self, candidate: Candidate, number: int) -> bool:
        return all(done_file(self.referred.folder, number, rank).exists() for rank in range(candidate.world))

    def _verdict(self, candidate: Candidate, number: int) -> Verdict:
        seen = partial(read_seen, self.referred.folder, number, candidate.world)
        layout = candidate.job.layout_for(candidate.world)
        what_if = partial(WhatIf, JobTrial(candidate.job), layout, self.referred)
        with one_thread():
            walked = walked_by(self.referred.folder, number, STEPS)
            verdict = verdict_on(candidate.text, what_if, self.referred, walked, seen)
            if not verdict.ok or self.native is None:
                return verdict
            parts = layout.reproducible_batch_size or candidate.parts
            return in_own_precision(verdict, *self.native.judge(parts, seen(*NATIVE)))
