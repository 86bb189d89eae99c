"""Megatron-Core's schedules under the plugin; the only modules that import Megatron."""
