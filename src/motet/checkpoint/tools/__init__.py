"""Work on complete checkpoints: comparing them, making others of them, and Distributed Checkpoint's format."""
