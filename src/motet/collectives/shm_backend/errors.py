"""What can go wrong between ranks. It is a `RuntimeError`, as torch's own is, and says who, what and with whom."""

from motet.core.errors import PeerFailedError, RankFailedError


class CollectiveError(RankFailedError, RuntimeError):
    """Ranks do not agree."""


class PeerLostError(PeerFailedError, CollectiveError):
    """Another rank has ended, left, given up, or does not come."""
