"""The protocol of a parameter server as state machines and messages, without torch."""
