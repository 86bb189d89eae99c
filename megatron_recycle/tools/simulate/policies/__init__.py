"""Policies: ours, published ones, and ideals to compare with, each with its source and constants."""

from __future__ import annotations
