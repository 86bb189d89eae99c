"""`python -m megatron_recycle.tools.rehearsal SCRIPT ARGUMENTS`: the script as rank 0, until it would meet other ranks.

By then Megatron-LM's options have been judged. A script that gets so far ends with `REACHED`, one that is refused ends
as it would in a job. Nothing is trained, no process group is made.
"""

from __future__ import annotations

import sys
from typing import Any, NoReturn

REACHED = 75


def main(arguments: list[str]) -> int:
    """Run it; the statuses are those of `megatron_recycle.__main__`, or `REACHED`."""
    import torch.distributed

    from megatron_recycle import __main__ as entry

    def stop(*_: Any, **__: Any) -> NoReturn:
        raise SystemExit(REACHED)

    torch.distributed.init_process_group = stop
    return entry.main(arguments)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
