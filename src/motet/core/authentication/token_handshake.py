"""The handshake with which the two ends of a connection prove that they know the token of the run, without sockets.

    connecting                                   accepting
      hello: nonce and public fields  --->
      <---  hello: nonce and public fields
      proof  --->                                checks it
      checks it                       <---  proof

A proof is HMAC-SHA256(token, purpose | direction | hello of the connecting side | hello of the accepting side). Each
nonce is new, so no proof holds in another connection, and the direction is in it, so none can be sent back. The
accepting side computes no proof before the other side's proof holds: nobody can use it to make proofs."""

import hashlib
import hmac
import secrets

from motet.core.authentication.run_token import RunToken

NONCE_BYTES, PROOF_BYTES = 32, 32
MAX_HELLO_BYTES = 2**16 - 1024  # What a peer may send before its proof holds is below 64 KiB
HANDSHAKE_TIMEOUT_S = 5.0


class HandshakeRefusedError(ConnectionError):
    """The other end of a connection has not proven that it knows the token of the run."""


class TokenHandshake:
    """One side of the handshake of one connection. `hello` and `proof` are sent, and the other side's are checked."""

    def __init__(self, token: RunToken, purpose: str, public_fields: bytes, *, is_accepting: bool) -> None:
        """The purpose, such as `parameter server`, keeps a proof from holding elsewhere."""
        self._key, self._purpose, self.is_accepting = token.secret.encode(), purpose.encode(), is_accepting
        self.hello = secrets.token_bytes(NONCE_BYTES) + public_fields
        assert len(self.hello) <= MAX_HELLO_BYTES
        self._peer_hello = b""
        self._is_proven = False

    def read_hello(self, hello: bytes) -> bytes:
        """Take the other side's hello. Returns its public fields, which nothing proves yet."""
        assert not self._peer_hello
        if not NONCE_BYTES <= len(hello) <= MAX_HELLO_BYTES:
            raise HandshakeRefusedError(f"a hello of {len(hello)} bytes, not {NONCE_BYTES} to {MAX_HELLO_BYTES}")
        if hmac.compare_digest(hello[:NONCE_BYTES], self.hello[:NONCE_BYTES]):
            raise HandshakeRefusedError("it has sent this side's own nonce back")
        self._peer_hello = bytes(hello)
        return self._peer_hello[NONCE_BYTES:]

    def proof(self) -> bytes:
        """The proof of this side. The accepting side has none before the other side's proof holds."""
        assert self._is_proven or not self.is_accepting
        return self._proof_of(is_accepting=self.is_accepting)

    def check_proof(self, proof: bytes) -> None:
        if not hmac.compare_digest(proof, self._proof_of(is_accepting=not self.is_accepting)):
            raise HandshakeRefusedError("its proof does not fit the token of this run")
        self._is_proven = True

    def _proof_of(self, *, is_accepting: bool) -> bytes:
        assert self._peer_hello
        hellos = [self.hello, self._peer_hello]
        direction = b"from the accepting side" if is_accepting else b"from the connecting side"
        parts = [b"motet 1", self._purpose, direction, *(reversed(hellos) if self.is_accepting else hellos)]
        content = b"".join(len(part).to_bytes(4, "big") + part for part in parts)
        return hmac.digest(self._key, content, hashlib.sha256)
