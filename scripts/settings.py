#!/usr/bin/env python3
"""Writes the settings as docs/configuration.md has them, from their one source, `megatron_recycle.config`."""

from __future__ import annotations

import re
from collections.abc import Mapping

from megatron_recycle.config import Option, flag, options, variable
from megatron_recycle.option import shown

GROUPS: Mapping[str, tuple[str, ...]] = {
    "On and off": ("enabled",),
    "Results": ("reduction", "block", "step", "split_backward", "clip_norm", "seed", "check_forward", "verify",
                "verify_every"),
    "What a failure leads to": ("policy", "keep_messages", "poison", "max_restarts",
                                "max_failures_per_host", "moves", "move_cost", "horizon",
                                "lend", "lend_layers", "slow_factor_out"),
    "A stage's last copy": ("guard", "guard_interval", "state_copies"),
    "Checkpoints and the end of a job": ("emergency_checkpoint", "on_leave", "leave_timeout", "on_failed_save", "mtbf"),
    "Plan, placement and memory": ("chunks", "placement", "cap", "memory", "costs", "planner_budget"),
    "Timeouts": ("heartbeat_interval", "heartbeat_timeout", "stall_floor", "report_timeout", "connect_timeout",
                 "transport_timeout"),
    "Files and network": ("run_dir", "interface"),
}
"""Settings by what they are for, as the documentation has them."""


def table() -> str:
    """All settings as Markdown: a heading for each group, and one for each setting."""
    known = {option.name: option for option in options()}
    rest = tuple(name for name in known if not any(name in names for names in GROUPS.values()))
    lines = []
    for title, names in {**GROUPS, **({"Others": rest} if rest else {})}.items():
        lines.append(f"## {title}\n")
        for option in (known[name] for name in names):
            values = ", ".join(f"`{value}`" for value in option.values().split("|"))
            lines += [f"### {option.name}\n", *_meaning(option),
                      f"Default `{shown(option.default)}`; values {values}. JSON key `{option.name}`, flag "
                      f"`{flag(option.name)}`, variable `{variable(option.name)}`.\n"]
    return "\n".join(lines).rstrip()


def _meaning(option: Option) -> list[str]:
    """What a setting does, as Markdown: the values that its help explains are a list."""
    known = {*option.choices, shown(option.default), "auto", "none", "true", "false", "0", "1", "2"}
    words = "|".join(map(re.escape, sorted(known, key=len, reverse=True)))
    said, *values = re.split(rf"(?:; |^)(?=(?:{words}): )", option.help)
    found = [f"{said[0].upper()}{said[1:]}{'' if said.endswith('.') else ':' if values else '.'}\n"] if said else []
    listed = [f"- `{name}`: {text}" for name, _, text in (value.partition(": ") for value in values)]
    return [*found, *listed[:-1], *(f"{last}\n" for last in listed[-1:])]


if __name__ == "__main__":
    print(table())
