"""Sizes of any module, from its forward pass on tensors without memory."""
