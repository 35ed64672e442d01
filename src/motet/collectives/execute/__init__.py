"""Programs and backend calls executed on tensors over a torch.distributed process group."""
