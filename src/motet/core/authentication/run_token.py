"""The secret that the processes of one run share, and where a process reads it.
A token is never on a command line, in a log, in an event or in a record: `repr` of a `RunToken` does not show it."""

import os
import secrets
import stat
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from motet.core.errors import InputError, check_input, convert_os_errors

TOKEN_VARIABLE, TOKEN_FILE_VARIABLE = "MOTET_RUN_TOKEN", "MOTET_RUN_TOKEN_FILE"
NO_AUTH_VARIABLE = "MOTET_NO_AUTH"  # The supervisor hands `--no-auth` to its ranks with it
MIN_TOKEN_CHARACTERS, MAX_TOKEN_BYTES = 16, 4096
HOW_TO_GIVE_A_TOKEN = (
    f"give every host the same token in the environment variable {TOKEN_VARIABLE}, or in a file of mode 0600 that "
    f"{TOKEN_FILE_VARIABLE} names (`openssl rand -hex 32` makes one), or let everybody in with --no-auth"
)


@dataclass(frozen=True)
class RunToken:
    """The secret of a run. It is empty in a run that admits everybody."""

    secret: str = field(repr=False)

    def environment(self) -> dict[str, str]:
        """The variables from which `read_run_token` reads this token."""
        return {TOKEN_VARIABLE: self.secret} if self.secret else {NO_AUTH_VARIABLE: "1"}


NO_AUTHENTICATION = RunToken("")


def new_run_token() -> RunToken:
    return RunToken(secrets.token_hex(32))


def read_run_token(environment: Mapping[str, str]) -> RunToken | None:
    """The token that the environment gives, or None if it gives none."""
    if environment.get(NO_AUTH_VARIABLE) == "1":
        return NO_AUTHENTICATION
    if (secret := environment.get(TOKEN_VARIABLE)) is not None:
        return _checked(secret, f"the environment variable {TOKEN_VARIABLE}")
    if (path := environment.get(TOKEN_FILE_VARIABLE)) is not None:
        return read_token_file(Path(path))
    return None


def read_token_file(path: Path) -> RunToken:
    """The token in a file that only this user can read."""
    remedy = f"give {TOKEN_FILE_VARIABLE} a file of mode 0600 that holds the token"
    with convert_os_errors(f"read the run token in {path}", remedy):
        descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
        with os.fdopen(descriptor, "rb") as file:
            status = os.fstat(descriptor)
            check_input(stat.S_ISREG(status.st_mode), f"{path} is not a regular file; {remedy}")
            owner = f"{path} belongs to the user with id {status.st_uid}, not to this one ({os.getuid()})"
            check_input(status.st_uid == os.getuid(), f"{owner}, who could know the token; {remedy}")
            mode = f"{path} has mode {stat.S_IMODE(status.st_mode):04o}, so that others can read or change the token"
            check_input(not status.st_mode & 0o077, f"{mode}; run `chmod 600 {path}` and take a new token")
            content = file.read(MAX_TOKEN_BYTES + 1)
    check_input(len(content) <= MAX_TOKEN_BYTES, f"{path} has more than {MAX_TOKEN_BYTES} bytes; {remedy}")
    try:
        return _checked(content.decode(), str(path))
    except UnicodeDecodeError as error:
        raise InputError(f"{path} is not text; {remedy}") from error


def write_token_file(path: Path, token: RunToken) -> None:
    """Write a new file that only this user can read, in the place of an older one."""
    with convert_os_errors(f"write the run token to {path}", "give a folder in which this user can write"):
        path.unlink(missing_ok=True)
        with os.fdopen(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600), "w") as file:
            file.write(token.secret)


def _checked(secret: str, source: str) -> RunToken:
    secret = secret.strip()
    check_input(
        len(secret) >= MIN_TOKEN_CHARACTERS,
        f"the run token in {source} has {len(secret)} characters, and at least {MIN_TOKEN_CHARACTERS} are needed; "
        "`openssl rand -hex 32` makes one",
    )
    return RunToken(secret)
