"""Tensors to messages and back, and the collectives that send them: the torch half of motet.collectives.compression.codec_options."""
