"""Hugging Face models: configs read without transformers, and modules adapted for training."""
