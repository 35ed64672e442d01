"""Errors between the ranks of a group: RuntimeErrors, as torch's are, that name the operation and the ranks."""

from motet.core.errors import PeerFailedError, RankFailedError


class CollectiveError(RankFailedError, RuntimeError):
    """Ranks do not agree."""


class PeerLostError(PeerFailedError, CollectiveError):
    """Another rank has ended, left the group, failed, or does not take part in time."""
