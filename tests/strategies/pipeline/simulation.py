"""Drawings of schedules."""


def short(action):
    """Return an action in three characters, such as 0F1: stage 0, forward, micro-batch 1."""
    return f"{action.stage}{action.kind}{action.micro_batch}"


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
