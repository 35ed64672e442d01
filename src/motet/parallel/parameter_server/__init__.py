"""The parameter server: workers compute gradients, servers keep and update parameters."""
