"""A run token is read only from places that others cannot read, and only its holders pass a handshake."""

import hashlib
import hmac
import os
from pathlib import Path

import pytest

from motet.core.errors import InputError
from motet.core.token_authentication import (
    MAX_HELLO_BYTES,
    MAX_TOKEN_BYTES,
    NO_AUTHENTICATION,
    NONCE_BYTES,
    HandshakeRefusedError,
    RunToken,
    TokenHandshake,
    new_run_token,
    read_run_token,
    write_token_file,
)

TOKEN = RunToken("a token of this test, long enough")


class TestSourcesOfTheToken:
    def test_a_new_token_reaches_a_rank_through_its_environment_and_is_never_shown(self) -> None:
        token = new_run_token()
        assert len(token.secret) == 64
        assert token != new_run_token()
        assert read_run_token(token.environment()) == token
        assert token.secret not in repr(token)

    def test_without_a_token_there_is_none_and_only_the_flag_lets_everybody_in(self) -> None:
        assert read_run_token({}) is None
        assert read_run_token(NO_AUTHENTICATION.environment()) == NO_AUTHENTICATION
        with pytest.raises(InputError, match="has 0 characters"):
            read_run_token({"MOTET_RUN_TOKEN": ""})

    def test_a_file_of_mode_0600_holds_it(self, tmp_path: Path) -> None:
        path = tmp_path / "token"
        path.write_text("older")
        path.chmod(0o644)
        write_token_file(path, TOKEN)
        assert path.stat().st_mode & 0o777 == 0o600
        assert read_run_token({"MOTET_RUN_TOKEN_FILE": str(path)}) == TOKEN
        path.write_text(TOKEN.secret + "\n")
        assert read_run_token({"MOTET_RUN_TOKEN_FILE": str(path)}) == TOKEN

    @pytest.mark.parametrize("mode", [0o640, 0o604, 0o620, 0o601])
    def test_a_file_that_others_can_open_is_refused(self, tmp_path: Path, mode: int) -> None:
        path = tmp_path / "token"
        write_token_file(path, TOKEN)
        path.chmod(mode)
        with pytest.raises(InputError, match=f"has mode 0{mode:o}") as refusal:
            read_run_token({"MOTET_RUN_TOKEN_FILE": str(path)})
        assert TOKEN.secret not in str(refusal.value)

    @pytest.mark.parametrize(
        ("content", "problem"),
        [(b"short", "has 5 characters"), (b"x" * (MAX_TOKEN_BYTES + 1), "more than"), (b"\xff" * 40, "is not text")],
    )
    def test_a_file_without_a_token_is_refused(self, tmp_path: Path, content: bytes, problem: str) -> None:
        path = tmp_path / "token"
        path.write_bytes(content)
        path.chmod(0o600)
        with pytest.raises(InputError, match=problem):
            read_run_token({"MOTET_RUN_TOKEN_FILE": str(path)})

    def test_a_pipe_a_folder_or_no_file_is_refused_and_nothing_waits(self, tmp_path: Path) -> None:
        os.mkfifo(tmp_path / "pipe", 0o600)
        for name, problem in {"pipe": "not a regular file", ".": "Is a directory", "none": "No such file"}.items():
            with pytest.raises(InputError, match=problem):
                read_run_token({"MOTET_RUN_TOKEN_FILE": str(tmp_path / name)})


def both_sides(
    connecting: tuple[RunToken, str, bytes] = (TOKEN, "purpose", b"a"),
    accepting: tuple[RunToken, str, bytes] = (TOKEN, "purpose", b"b"),
) -> tuple[TokenHandshake, TokenHandshake]:
    """Two sides that have read each other's hello."""
    a, b = TokenHandshake(*connecting, is_accepting=False), TokenHandshake(*accepting, is_accepting=True)
    assert (a.read_hello(b.hello), b.read_hello(a.hello)) == (accepting[2], connecting[2])
    return a, b


class TestHandshake:
    def test_holders_of_the_token_pass(self) -> None:
        a, b = both_sides()
        b.check_proof(a.proof())
        a.check_proof(b.proof())

    def test_a_proof_is_what_its_page_says(self) -> None:
        a, b = both_sides()
        content = b""
        for part in [b"motet 1", b"purpose", b"from the connecting side", a.hello, b.hello]:
            content += len(part).to_bytes(4, "big") + part
        assert a.proof() == hmac.new(TOKEN.secret.encode(), content, hashlib.sha256).digest()

    @pytest.mark.parametrize(
        "stranger",
        [
            (RunToken("another token, as long as that"), "purpose", b"a"),
            (NO_AUTHENTICATION, "purpose", b"a"),
            (TOKEN, "another purpose", b"a"),
        ],
    )
    def test_another_token_or_purpose_is_refused_by_both_sides(self, stranger: tuple[RunToken, str, bytes]) -> None:
        a, b = both_sides(connecting=stranger)
        with pytest.raises(HandshakeRefusedError, match="does not fit"):
            b.check_proof(a.proof())
        a, b = both_sides(accepting=stranger)
        b._is_proven = True  # type: ignore[attr-defined]  # a stranger checks nothing
        with pytest.raises(HandshakeRefusedError, match="does not fit"):
            a.check_proof(b.proof())

    def test_a_replayed_proof_is_refused(self) -> None:
        a, b = both_sides()
        again = TokenHandshake(TOKEN, "purpose", b"b", is_accepting=True)
        again.read_hello(a.hello)
        b.check_proof(a.proof())
        with pytest.raises(HandshakeRefusedError, match="does not fit"):
            again.check_proof(a.proof())

    def test_a_reflected_hello_or_proof_is_refused(self) -> None:
        a, _ = both_sides()
        with pytest.raises(HandshakeRefusedError, match="does not fit"):
            a.check_proof(a.proof())
        fresh = TokenHandshake(TOKEN, "purpose", b"a", is_accepting=False)
        with pytest.raises(HandshakeRefusedError, match="own nonce"):
            fresh.read_hello(fresh.hello)
        with pytest.raises(HandshakeRefusedError, match="own nonce"):
            fresh.read_hello(fresh.hello[:NONCE_BYTES] + b"other fields")

    def test_a_proof_of_the_same_direction_is_refused(self) -> None:
        a, b = (TokenHandshake(TOKEN, "purpose", b"", is_accepting=False) for _ in range(2))
        a.read_hello(b.hello)
        b.read_hello(a.hello)
        with pytest.raises(HandshakeRefusedError, match="does not fit"):
            b.check_proof(a.proof())

    @pytest.mark.parametrize("changed", ["connecting", "accepting"])
    def test_a_changed_public_field_is_refused(self, changed: str) -> None:
        a = TokenHandshake(TOKEN, "purpose", b"name=w0", is_accepting=False)
        b = TokenHandshake(TOKEN, "purpose", b"name=s0", is_accepting=True)
        a.read_hello(b.hello[:-1] + b"1" if changed == "accepting" else b.hello)
        b.read_hello(a.hello[:-1] + b"1" if changed == "connecting" else a.hello)
        with pytest.raises(HandshakeRefusedError, match="does not fit"):
            b.check_proof(a.proof())

    def test_the_accepting_side_proves_nothing_to_a_stranger(self) -> None:
        _, b = both_sides()
        with pytest.raises(AssertionError):
            b.proof()

    @pytest.mark.parametrize("length", [0, NONCE_BYTES - 1, MAX_HELLO_BYTES + 1])
    def test_a_hello_of_a_wrong_length_is_refused(self, length: int) -> None:
        with pytest.raises(HandshakeRefusedError, match=f"a hello of {length} bytes"):
            TokenHandshake(TOKEN, "purpose", b"", is_accepting=True).read_hello(bytes(length))
