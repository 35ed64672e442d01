"""Which dtype each kind of tensor has, and the machinery that keeps it so."""
