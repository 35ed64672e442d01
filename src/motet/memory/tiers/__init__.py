"""Memory beyond that of the device: where states lie, and the copies between the places."""
