"""Random problems for the property tests: small grids with every feature of the plan file."""

from __future__ import annotations

from hypothesis import strategies as st

from megatron_recycle.plan import Costs, Grid, Problem, Worker


@st.composite
def problems(draw, blocks=True, largest=4):
    """A solvable problem: every stage keeps a worker that can hold a micro-batch."""
    stages = draw(st.integers(1, 4))
    pipelines = draw(st.integers(1, largest))
    microbatches = draw(st.lists(st.integers(0, 6), min_size=pipelines, max_size=pipelines).filter(any))
    grid = Grid(stages, tuple(microbatches))
    failed = set()
    for stage in range(stages):
        count = draw(st.integers(0, pipelines - 1))
        failed |= {Worker(d, stage) for d in draw(st.permutations(range(pipelines)))[:count]}
    if draw(st.booleans()):
        failed = set()
    live = [w for w in grid.workers() if w not in failed]
    speeds = draw(st.dictionaries(st.sampled_from(live), st.sampled_from([1.5, 2, 1.1, 3.25]), max_size=2))
    before = tuple(draw(st.integers(1, 2)) for _ in range(stages))
    after = tuple(draw(st.integers(0, 2)) for _ in range(stages))
    need = max(*before, *after)
    cost = st.integers(0, 30)
    costs = Costs(*(tuple(draw(cost) for _ in range(stages)) for _ in range(3)),
                  hop=draw(st.integers(0, 5)), step=tuple(draw(cost) for _ in range(stages)), speed=speeds)
    caps = {w: draw(st.integers(need, need + 6)) for w in grid.workers()} if draw(st.booleans()) else {}
    tied = ((0, stages - 1),) if stages > 1 and draw(st.booleans()) else ()
    return Problem(grid, costs, tuple(failed), caps, before, after,
                   message=tuple(draw(st.integers(0, 2)) for _ in range(stages)),
                   block=draw(st.integers(0, 3)) if blocks else 0, tied=tied,
                   split_backward=draw(st.booleans()),
                   full_backward=draw(st.sampled_from([(), (0,), tuple(range(stages))])),
                   objective=draw(st.sampled_from(["period", "makespan"])))
