"""`python -m megatron_recycle.tools.rehearsal [--pretend] SCRIPT ARGUMENTS`: the script as rank 0, until it would meet
other ranks.

By then Megatron-LM's options have been judged. A script that gets so far ends with `REACHED`; a refused one ends as it
would in a job. Nothing is trained, no process group is made. Scripts that insist on a GPU before they read their
options see a fake one (`--pretend`), so a login node will do; no computation runs there either.
"""

from __future__ import annotations

import sys
from types import SimpleNamespace
from typing import Any, NoReturn

REACHED = 75
INSISTS = "Megatron requires CUDA"
"""Megatron-LM's message where there is no GPU."""

_HOPPER = SimpleNamespace(name="pretended", major=9, minor=0, total_memory=80 << 30, multi_processor_count=132)


def main(arguments: list[str]) -> int:
    """Run it; the statuses are those of `megatron_recycle.__main__`, or `REACHED`."""
    import torch.distributed

    from megatron_recycle import __main__ as entry

    def stop(*_: Any, **__: Any) -> NoReturn:
        raise SystemExit(REACHED)

    torch.distributed.init_process_group = stop
    if arguments[:1] == ["--pretend"]:
        arguments = arguments[1:]
        torch.cuda.is_available = lambda: True
        torch.cuda.set_device = lambda device: None
        torch.cuda.current_device = lambda: 0
        torch.cuda.get_device_capability = lambda device=None: (_HOPPER.major, _HOPPER.minor)
        torch.cuda.get_device_properties = lambda device=None: _HOPPER
    return entry.main(arguments)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
