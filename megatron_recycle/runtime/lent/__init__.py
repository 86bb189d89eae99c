"""Layers that a neighbouring stage's worker runs for a micro-batch: its copies of them, and their transfers."""
