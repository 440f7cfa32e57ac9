"""Simulation and drawing of schedules: every action as early as possible, with messages that take no time."""

from trainkit.strategies.pipeline.schedules import BACKWARD, FORWARD, Action, Span


def short(action):
    """Return an action in three characters, such as 0F1: stage 0, forward, micro-batch 1."""
    return f"{action.stage}{action.kind}{action.micro_batch}"


def simulate(actions, costs, num_stages):
    """Return every rank's actions with their times if messages take no time.

    `actions` has one list for each rank; `costs` has the time of ("F" or "B", stage). Raises ValueError for a
    schedule that deadlocks.
    """
    spans = [[] for _ in actions]
    ends = {}
    remaining = sum(len(rank_actions) for rank_actions in actions)
    while remaining:
        progress = False
        for rank_spans, rank_actions in zip(spans, actions, strict=True):
            while len(rank_spans) < len(rank_actions):
                action = rank_actions[len(rank_spans)]
                needs = prerequisites(action, num_stages)
                if any(need not in ends for need in needs):
                    break
                ready = max((ends[need] for need in needs), default=0.0)
                start = max(ready, rank_spans[-1].end if rank_spans else 0.0)
                ends[action] = start + costs[action.kind, action.stage]
                rank_spans.append(Span(action, start, ends[action]))
                remaining -= 1
                progress = True
        if not progress:
            waiting = [
                short(todo[len(done)]) for done, todo in zip(spans, actions, strict=True) if len(done) < len(todo)
            ]
            raise ValueError(f"the schedule deadlocks at {', '.join(waiting)}")
    return spans


def prerequisites(action, num_stages):
    """Return the actions that must have ended before this one may start."""
    needs = []
    if action.kind == FORWARD and action.stage > 0:
        needs.append(Action(FORWARD, action.stage - 1, action.micro_batch))
    if action.kind == BACKWARD:
        needs.append(Action(FORWARD, action.stage, action.micro_batch))
        if action.stage < num_stages - 1:
            needs.append(Action(BACKWARD, action.stage + 1, action.micro_batch))
    return needs


def draw(spans, *, with_stage=False):
    """Return a drawing with a line for each rank and a column for each unit of time; dots are idle time."""
    length = round(max((rank_spans[-1].end for rank_spans in spans if rank_spans), default=0.0))
    lines = []
    for rank, rank_spans in enumerate(spans):
        width = 3 if with_stage else 2
        cells = ["." * width] * length
        for span in rank_spans:
            text = short(span.action)
            text = text if with_stage else text.removeprefix(str(span.action.stage))
            for column in range(round(span.start), round(span.end)):
                cells[column] = text
        lines.append(f"rank {rank}  {' '.join(cells)}")
    return "\n".join(lines)
