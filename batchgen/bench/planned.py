"""The order in which `batchgen run` would give a workload's rows to the engine."""

from typing import NamedTuple

from batchgen.bench.workloads import Tokens, Workload
from batchgen.planning.plan import make_plan
from batchgen.planning.spool import Spool

_PAGE_SIZE = 64


class PlannedRow(NamedTuple):
    """A row of a workload: its number there, its prompt, the tokens to draw, and what the next one begins with too."""

    row: int
    tokens: Tokens
    outputs: int
    shared_with_next: int


def planned(work: Workload) -> list[PlannedRow]:
    """All rows in planned order, as one window. No prompt is merged with an equal one."""
    with Spool() as spool:
        for tokens, outputs in work:
            spool.append(tokens, b"", outputs=outputs)
        plan = make_plan(spool.tokens(), spool.outputs, spool.merge_keys, _PAGE_SIZE)
    shared = [*plan.shared[1:].tolist(), 0]
    order = plan.order.tolist()
    return [PlannedRow(row, work[row][0], work[row][1], common) for row, common in zip(order, shared, strict=True)]


def in_file_order(work: Workload) -> list[PlannedRow]:
    """All rows as they come, with nothing known of what they share."""
    return [PlannedRow(row, tokens, outputs, 0) for row, (tokens, outputs) in enumerate(work)]
