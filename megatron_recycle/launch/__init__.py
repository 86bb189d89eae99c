"""Starting a job: `recycle run`, which spares a dead worker's siblings, and the coordinator's process."""
