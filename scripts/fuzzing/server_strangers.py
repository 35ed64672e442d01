"""Strangers at a parameter server: connections without the token of the run.

Whatever they send, they get no proof, no message of theirs reaches the server, and a good worker pulls every parameter
with the bits that the server started with.
"""

from pathlib import Path
from typing import ClassVar

from fuzzing.cases import FuzzCase, FuzzTarget, Outcome
from fuzzing.handshakes import CONNECTING, Stranger, checked_log, framed
from fuzzing.server_processes import SECRET, FramePeer, ServedParameters, frames_of, public_fields

CHECK_EVERY = 5


class ServerStrangerTarget(FuzzTarget):
    """Connections to a server that goes on to serve good workers."""

    name: ClassVar[str] = "server-strangers"
    first_check: ClassVar[str] = "the hello is complete, has a length that is admitted, and is not the listener's own"

    def __init__(self, folder: Path) -> None:
        super().__init__(folder)
        self.served = ServedParameters()
        hello = bytes(range(32)) + public_fields("w7")
        peer = FramePeer(self.served.address, "w8")
        peer.close()
        other = FramePeer.__new__(FramePeer)
        super(FramePeer, other).__init__(self.served.address)
        accepting_hello = other.authenticate(SECRET, hello)
        other.close()
        self.replay = hello, SECRET.proof(CONNECTING, hello, accepting_hello)

    def run(self, case: FuzzCase) -> Outcome:
        with checked_log():
            name = case.rng.choice(("w1", "s0", "s1", "coordinator", "host/w3.1+2", "x" * 400, "", "w1\n"))
            stranger = Stranger(SECRET, lambda: public_fields(name), self.replay)
            connection, is_past = stranger.act(case, self.served.address)
            try:
                if case.rng.random() < 0.5:  # Messages without a proof
                    connection.send(b"".join(frames_of(1, "ServerShutdown", [0], b"")) * case.rng.choice((1, 500)))
            finally:
                if case.number % CHECK_EVERY == 0 or case.rng.random() < 0.05:
                    self.served.check()
                connection.close()
            self.served.process.check_alive()
        return Outcome("refused", "closed", is_past)

    def close(self) -> None:
        self.served.check()
        self.served.close()


assert framed(b"") == bytes(4)
