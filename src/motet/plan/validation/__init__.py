"""Published measurements of training steps, and the errors of predictions."""
