"""Everything that talks to other workers through torch.distributed."""
