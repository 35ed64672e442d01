"""A job is code: it can name a function of the user, which training calls. So a run folder that other users can change
is asked about before its job runs."""

import os
import stat
from pathlib import Path

from motet.core.errors import check_input
from motet.models.settings import UserModuleSettings
from motet.train.job import Job
from motet.train.launch.run_folder import JOB_FILE

_ROOT_ID = 0  # Can change everything anyway


def check_trusted(job: Job, folder: Path, *, is_trusted: bool) -> None:
    """Refuse a job that calls a function, if its run folder belongs to another user or everybody can change it."""
    settings = job.model
    if is_trusted or not isinstance(settings, UserModuleSettings) or settings.hf_path is not None:
        return
    risk = (
        f"its job calls model.factory = {settings.factory!r}, which can do whatever you can do; look at the job, then "
        "give --trust, or copy the folder and resume the copy"
    )
    for path in (folder, folder / JOB_FILE):
        if not path.exists():
            continue
        status = path.stat()
        owner = f"{path} belongs to another user (id {status.st_uid}; you have {os.geteuid()})"
        check_input(status.st_uid in (_ROOT_ID, os.geteuid()), f"{owner}, and {risk}")
        mode = f"every user can change {path} (mode {stat.S_IMODE(status.st_mode):04o})"
        check_input(not status.st_mode & stat.S_IWOTH, f"{mode}, and {risk}")
