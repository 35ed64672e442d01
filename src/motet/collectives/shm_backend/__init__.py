"""The torch.distributed backend `motet` for CPU ranks: shared memory inside a host, sockets between hosts.

Importing this registers it; then `init_process_group("cpu:motet")` or `new_group(backend="motet")` use it.
"""

import torch.distributed as dist

from motet.collectives.program import CollectiveError, PeerLostError
from motet.collectives.shm_backend.process_group import MotetProcessGroup

__all__ = ["CollectiveError", "MotetProcessGroup", "PeerLostError"]

if "motet" not in dist.Backend.backend_list:
    dist.Backend.register_backend("motet", MotetProcessGroup, devices="cpu")
