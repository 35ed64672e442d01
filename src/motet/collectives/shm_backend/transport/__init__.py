"""Shared memory and sockets that carry the bytes of the backend `motet`."""
