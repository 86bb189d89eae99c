"""A user's script that trains a recipe with Megatron-Bridge's `pretrain`; to be run by a launcher, after
`tests/te/stand_in.py`. Its argument is the arguments of `recipe`, as JSON."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path


def main(arguments: str) -> None:
    sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
    from tests.bridge import stand_in
    from tests.bridge.job import recipe

    stand_in.install(Path(os.environ[stand_in.FOLDER]))

    # From here on as in any script of Bridge's users.
    from megatron.bridge.training.gpt_step import forward_step
    from megatron.bridge.training.pretrain import pretrain

    pretrain(recipe(**json.loads(arguments)), forward_step)


if __name__ == "__main__":
    main(sys.argv[1])
