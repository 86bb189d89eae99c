"""Tools beside a job: they show it, inject faults into it, or simulate it.

The plugin works without this folder. Only subcommands of `recycle` import from it, when they need a tool.
"""
