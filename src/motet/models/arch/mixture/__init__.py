"""Mixtures of experts: the router, the experts, the limit of their load, and the exchange of tokens of a row."""
