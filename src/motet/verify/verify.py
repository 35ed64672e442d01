"""Layouts against one device: the reference here, then the ranks of each layout, and a verdict on what they have."""

import math
import shutil
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path
from threading import Event

from motet.core.errors import InputError
from motet.parallel.layout import resolve_layout
from motet.train.folder import JOB_FILE
from motet.train.job import Job
from motet.train.launch import Ended, Launch, launch, rank_environment
from motet.train.preflight import check_job
from motet.train.toml import to_toml
from motet.verify.explain import explain
from motet.verify.layouts import Candidate, laid_out
from motet.verify.native import Native, in_own_precision, refer_native
from motet.verify.rank import NATIVE, done_file, native_folder, read_seen, seen_file
from motet.verify.record import Seen
from motet.verify.runs import Referred, one_thread, phases, refer
from motet.verify.served import Servers
from motet.verify.shares import WhatIf
from motet.verify.shrink import shrink
from motet.verify.trial import JobTrial
from motet.verify.verdict import Verdict, judge, of_one_device, wrong

STEPS = 3
POLL_S = 0.1
FEWEST_ROWS = 8
WORK = "motet.verify.rank:layout_rank"
Tell = Callable[[str], None]


@dataclass(frozen=True)
class Subject:
    """A small job, and the layouts in which it is to compute what one device does."""

    job: Job
    """In float64."""
    candidates: Sequence[Candidate]
    native: Job
    """The same in its own precision."""


def subject_of(job: Job, layouts: Sequence[str], tell: Tell) -> Subject:
    """A job of the same structure that is small, with a batch that all layouts can cut evenly."""
    if job.outer.every is not None:
        raise InputError(
            f"outer.every = {job.outer.every}: replicas that train apart do not compute what one device does; leave it "
            "out, and verify how each replica is spread"
        )
    candidates = [laid_out(job, layout) for layout in layouts]
    for key in ("compress_gradients", "compress_parameters"):
        if (codec := getattr(job.communication, key)) is not None:
            tell(f"communication.{key} = {codec!r} loses bits by design and is left out here")
    small = shrink(job, _rows([candidate.parts for candidate in candidates]), STEPS)
    fitting = [laid_out(small, layout) for layout in layouts]
    for candidate in fitting:
        check_job(candidate.job, candidate.world)
    return Subject(small, fitting, small.model_copy(update={"precision": job.precision}))


def _rows(parts: Sequence[int]) -> int:
    """As few as can be cut into any of these, with two or more in each, and eight or more in all."""
    unit = math.lcm(*parts)
    return unit * math.ceil(max(FEWEST_ROWS, 2 * max(parts)) / unit)


def verify(subject: Subject, environment: Mapping[str, str], tell: Tell) -> Iterator[Verdict]:
    """One verdict after another, those with few ranks first."""
    with tempfile.TemporaryDirectory(prefix="motet-verify-") as name:
        folder = Path(name)
        (folder / "logs").mkdir()
        start_s = time.perf_counter()
        referred, native = refer(JobTrial(_stored(subject.job, folder)), folder), None
        if referred.differs is not None:
            yield from (found for each in subject.candidates if (found := of_one_device(each.text, referred)))
            return
        if subject.native.precision.recipe != subject.job.precision.recipe:
            trial = JobTrial(_stored(subject.native, native_folder(folder)))
            native = refer_native(trial, native_folder(folder), referred.single[0].varying)
        tell(f"one device: {STEPS} steps, and again from perturbed parameters: {time.perf_counter() - start_s:.1f} s")
        runs = _Runs(subject.job, referred, native, environment, tell)
        recorded = [candidate for candidate in subject.candidates if not candidate.job.layout.has_desk]
        yield from runs.verdicts(sorted(recorded, key=lambda each: each.world))
        servers = Servers(subject.job, referred, environment)
        for candidate in subject.candidates:
            if candidate.job.layout.has_desk:
                start_s = time.perf_counter()
                verdict = servers.verdict(candidate)
                yield replace(verdict, seconds=time.perf_counter() - start_s)


def _stored(job: Job, folder: Path) -> Job:
    """For ranks to read."""
    folder.mkdir(exist_ok=True)
    (folder / JOB_FILE).write_text(to_toml(job.model_dump(exclude_none=True, exclude_unset=True)))
    return job


@dataclass(frozen=True)
class _Runs:
    """Of layouts, each on ranks of its own."""

    job: Job
    referred: Referred
    native: Native | None
    environment: Mapping[str, str]
    tell: Tell

    def verdicts(self, left: list[Candidate]) -> Iterator[Verdict]:
        """Of layouts that ranks do one after another, those with few ranks first."""
        while left:
            judged, ended = self._run(left)
            yield from judged
            left = left[len(judged) :]
            if left:  # the first that is left ended the others with it
                yield Verdict(left.pop(0).text, False, math.inf, "", cause=ended.message or "its ranks ended")

    def _run(self, candidates: Sequence[Candidate]) -> tuple[list[Verdict], Ended]:
        """Of those that came to their end; each is judged while the ranks do the next one."""
        folder = self.referred.folder
        for old in folder.glob("layout-*"):
            shutil.rmtree(old) if old.is_dir() else old.unlink()
        start = Launch(
            command=(sys.executable, "-m", "motet.cli.rank", WORK, str(folder), *(each.text for each in candidates)),
            ranks=max(each.world for each in candidates),
            environment=rank_environment(self.environment, 1),
            logs=folder / "logs",
        )
        over = Event()
        with ThreadPoolExecutor(1) as pool:  # not the ranks there: signals reach the main thread
            judging = pool.submit(self._judge_as_they_come, candidates, over)
            try:
                ended = launch(start, self.tell)
            finally:
                over.set()
            return judging.result(), ended

    def _judge_as_they_come(self, candidates: Sequence[Candidate], over: Event) -> list[Verdict]:
        found: list[Verdict] = []
        before_s = time.perf_counter()
        for number, candidate in enumerate(candidates):
            while not (done := self._is_done(candidate, number)) and not over.wait(POLL_S):
                pass
            if not done and not self._is_done(candidate, number):  # it may have come with the end
                break
            verdict = self._verdict(candidate, number)
            now_s = time.perf_counter()
            found.append(replace(verdict, seconds=now_s - before_s))
            before_s = now_s
            self.tell(f"{len(found)} of {len(candidates)}: {candidate.text} is {'the same' if verdict.ok else 'WRONG'}")
            for file in self.referred.folder.glob(f"layout-{number}-*-rank-*.pt"):
                file.unlink()
        return found

    def _is_done(self, candidate: Candidate, number: int) -> bool:
        return all(done_file(self.referred.folder, number, rank).exists() for rank in range(candidate.world))

    def _verdict(self, candidate: Candidate, number: int) -> Verdict:
        def seen(phase: str, step: int) -> list[list[Seen]]:
            files = (seen_file(self.referred.folder, number, (phase, step), rank) for rank in range(candidate.world))
            return [read_seen(file) for file in files]

        with one_thread():
            worst, first = judge(self.referred, phases(STEPS), seen)
            if first is not None:
                layout = resolve_layout(candidate.job.layout, candidate.world, self.job.data.batch_sequences)
                what_if = WhatIf(JobTrial(candidate.job), layout, self.referred, first.step)
                cause = explain(what_if, seen(first.phase, first.step), first)
                return wrong(candidate.text, worst, first, cause)
            same = Verdict(candidate.text, True, worst.difference.relative, str(worst))
            if self.native is None:
                return same
            parts = self.job.data.batch_sequences if candidate.job.run.reproducible else candidate.parts
            return in_own_precision(same, *self.native.judge(parts, seen(*NATIVE)))
