"""Communication with other workers through torch.distributed."""
