"""Communication between ranks; the transport counts its bytes."""
