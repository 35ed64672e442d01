"""The commands of `motet checkpoint` that look into checkpoints and make others of them."""
