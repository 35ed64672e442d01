"""Codecs that make tensors small for the wire, one file each, and the collectives that send their messages."""
