"""A window of torch.profiler over a few steps, written as a Chrome trace with the spans of `core.trace` in it."""

from contextlib import ExitStack
from pathlib import Path

import torch
from torch.profiler import ProfilerActivity, profile, record_function

from motet.core import trace
from motet.monitor.events import ProfileSaved, WarningIssued


class TorchProfilerWindow:
    """Records up to `steps` steps from `first_step` on."""

    def __init__(self, folder: Path, first_step: int, steps: int) -> None:
        self._folder, self._first_step, self._end_step = folder, first_step, first_step + steps
        self._current_step = 0
        self._window_start: int | None = None
        self._profile: profile | None = None
        self._exit_stack = ExitStack()

    def step(self, step: int) -> ProfileSaved | None:
        """Called before step `step`: opens the window, or closes it and reports the file."""
        self._current_step = step
        if self._profile is not None and step >= self._end_step:
            return self._save()
        if self._profile is None and self._window_start is None and self._first_step <= step < self._end_step:
            self._window_start = step
            activities = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if torch.cuda.is_available() else [])]
            self._profile = self._exit_stack.enter_context(profile(activities=activities))
            self._exit_stack.enter_context(trace.profiler_ranges(record_function))
        return None

    def close(self) -> ProfileSaved | WarningIssued | None:
        """Called after the last step: saves an open window, or warns if there was none."""
        if self._profile is not None:
            return self._save()
        if self._window_start is None:
            when = f"monitor.profile_from = {self._first_step}, and no step from there to {self._end_step - 1} was done"
            return WarningIssued(text=f"nothing was profiled: {when}; choose a step that is still to come")
        return None

    def _save(self) -> ProfileSaved:
        assert self._profile is not None and self._window_start is not None
        recorded, self._profile = self._profile, None
        self._exit_stack.close()
        first, last = self._window_start, self._current_step - 1
        path = self._folder / f"profile-steps-{first}-{last}.json"
        recorded.export_chrome_trace(str(path))
        return ProfileSaved(first_step=first, last_step=last, path=path.name)
