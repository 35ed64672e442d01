"""`motet verify`: a parallel layout compared with one device, tensor by tensor; `motet.verify` is in `api`."""
