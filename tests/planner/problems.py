"""Random problems for the property tests: small grids with every feature of the plan file."""

from __future__ import annotations

from itertools import pairwise

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


@st.composite
def placed(draw, lending=True):
    """A solvable problem whose stages have several chunks, of which layers may be lent."""
    stages, pipelines = draw(st.integers(1, 3)), draw(st.integers(1, 3))
    grid = Grid(stages, tuple(draw(st.lists(st.integers(0, 4), min_size=pipelines, max_size=pipelines).filter(any))))
    down = tuple(range(stages))
    placement = draw(st.sampled_from([down, (*down, *reversed(down)), down * 2, (*down, *reversed(down), *down),
                                      (*reversed(down), *down)]))
    chunks = len(placement)
    failed = {Worker(d, stage) for stage in range(stages)
              for d in draw(st.permutations(range(pipelines)))[:draw(st.integers(0, pipelines - 1))]}
    live = [w for w in grid.workers() if w not in failed]
    cost, each = st.integers(0, 20), st.integers(1, 4)
    layers = tuple(draw(each) for _ in range(chunks))
    layer = tuple((draw(st.integers(0, 6)), draw(st.integers(0, 6)), draw(st.integers(0, 6))) for _ in range(chunks))
    lend = tuple((0, 0) if one == other else (draw(st.integers(0, layers[c])), draw(st.integers(0, layers[c + 1])))
                 for c, (one, other) in enumerate(pairwise(placement))) if lending else ()
    before, after = (tuple(draw(st.integers(0, 3)) for _ in range(chunks)) for _ in range(2))
    need = max(sum(max(before[c], after[c]) for c in range(chunks) if placement[c] == stage) for stage in range(stages))
    costs = Costs(*(tuple(draw(cost) for _ in range(chunks)) for _ in range(3)), hop=draw(st.integers(0, 5)),
                  step=tuple(draw(cost) for _ in range(stages)), layer=layer,
                  speed=draw(st.dictionaries(st.sampled_from(live), st.sampled_from([1.5, 2, 0.7]), max_size=2)),
                  lent=(draw(st.integers(0, 9)), draw(st.integers(0, 9))))
    caps = {w: draw(st.integers(max(1, need), need + 6)) for w in grid.workers()} if draw(st.booleans()) else {}
    # What others send early may exceed every cap where chunks are placed otherwise.
    message = draw(st.integers(0, 1)) if placement in (down, (*down, *reversed(down))) else 0
    return Problem(grid, costs, tuple(failed), caps, before, after, message=(message,) * chunks,
                   block=draw(st.integers(0, 2)), tied=((0, chunks - 1),) if chunks > 1 and draw(st.booleans()) else (),
                   split_backward=draw(st.booleans()), full_backward=draw(st.sampled_from([(), (0,)])),
                   objective=draw(st.sampled_from(["period", "makespan"])), placement=placement, layers=layers,
                   lend=lend,
                   layer_held=tuple((draw(st.integers(0, 1)), draw(st.integers(0, 1))) for _ in range(chunks)),
                   layer_parameters=tuple(draw(st.integers(0, 1)) for _ in range(chunks)))
