"""What the next step computes: admission, prefill and decode steps, preemption. All of the policy is here."""

from collections import deque
from itertools import compress

import numpy as np
import numpy.typing as npt

from batchgen.engine.config import EngineConfig, Limits, num_pages
from batchgen.engine.handover import Handover
from batchgen.engine.kv_cache import PagePool
from batchgen.engine.output_lengths import OutputLengths
from batchgen.engine.sequence import Ints, RowTable, Sequence
from batchgen.engine.stats import EngineStats
from batchgen.engine.step import NO_COPIES, Chunk, Step


class Scheduler:
    """Decides step by step who runs. A sequence is waiting, filling (its prompt is being computed) or decoding.

    Prefill steps and decode steps are kept apart, and prompts come in large helpings: when enough rows and pages are
    free (or nothing decodes), prompts are admitted until nothing fits, then answers run on. A sequence is admitted when
    its prompt and its expected output fit beside what is promised to the others, so that preemption is a last resort:
    the newest sequence gives up its pages and computes its tokens again later.

    What a request has in common with the next one is handed over to it (see Handover): in a planned order no shared
    token is computed twice.
    """

    def __init__(
        self, config: EngineConfig, limits: Limits, pool: PagePool, table: RowTable, stats: EngineStats
    ) -> None:
        self._config, self._limits, self._pool, self._table, self._stats = config, limits, pool, table, stats
        self._lengths = OutputLengths(config.output_reserve)
        self._waiting: deque[Sequence] = deque()
        self._running: set[Sequence] = set()
        self._filling: deque[Sequence] = deque()
        self._decoding: list[Sequence] = []  # never changed in place: steps in flight hold it
        self._decoding_rows: Ints = np.empty(0, np.int64)
        self._joining: list[Sequence] = []  # decode from the next decode step on
        self._forced: list[Sequence] = []  # wait for a prefill step of the tokens that had to come
        self._forced_tokens = 0
        self._left: set[Sequence] = set()  # those of _decoding that decode no more
        self._max_tokens = limits.max_tokens
        self._handover = Handover(pool, limits.page_size)
        self._promised = 0
        self._admissions = 0
        self._refilling = False

    @property
    def num_waiting(self) -> int:
        """Sequences that have no row yet."""
        return len(self._waiting)

    @property
    def num_running(self) -> int:
        """Sequences that hold rows."""
        return len(self._running)

    @property
    def held_pages(self) -> list[int]:
        """Pages that are kept for sequences to come."""
        return self._handover.pages

    def add(self, seq: Sequence) -> None:
        """Queue a sequence."""
        self._waiting.append(seq)

    def schedule(self, *, in_flight: bool) -> Step | None:
        """The next step. None: nothing can run, or not before the steps in flight have been collected."""
        self._handover.begin_step()
        if self._wants_prefill() and (step := self._prefill_step()):
            return step
        return self._decode_step(in_flight)

    def finish(self, seq: Sequence) -> None:
        """Take a sequence out: its row and pages are free.

        Steps in flight may still read and write them. That does no harm: steps run in the order of their launch, so
        whoever gets the pages next writes later.
        """
        seq.finished = True
        self._vacate(seq)
        if not seq.scoring:
            self._leave(seq)
            self._lengths.add(len(seq.outputs))

    def fill_forced(self, seq: Sequence) -> None:
        """Compute the forced tokens at the end of a sequence's outputs in a prefill step, together with others'."""
        seq.fill_outputs()
        self._leave(seq)
        missing = num_pages(len(seq.fill), self._limits.page_size) - int(self._table.num_pages[seq.row])
        if all(self._grow(seq) for _ in range(missing)):
            self._forced.append(seq)
            self._forced_tokens += seq.num_forced
        else:
            self._preempt(seq)

    def shrink(self) -> None:
        """Make prefill steps of half the tokens from now on."""
        self._max_tokens = max(1, self._max_tokens // 2)

    def abort_all(self) -> None:
        """Drop every sequence."""
        for seq in list(self._running):
            seq.finished = True
            self._vacate(seq)
        self._handover.begin_step()
        self._handover.drop()
        self._waiting.clear()
        self._filling.clear()
        self._joining.clear()
        self._forced, self._forced_tokens = [], 0
        self._left.update(self._decoding)

    def _wants_prefill(self) -> bool:
        # Forced tokens wait until they save as many draws as a decode step makes.
        if self._filling or (self._forced and self._forced_tokens >= len(self._running) - len(self._forced)):
            return True
        if not self._waiting:
            return False
        if self._refilling or not self._running or not (self._decoding or self._joining):
            return True
        share = self._limits.refill_share
        self._refilling = (
            self._table.num_free >= share * self._limits.max_rows
            and self._pool.num_free - self._promised >= share * self._limits.num_pages
        )
        return self._refilling

    def _prefill_step(self) -> Step | None:
        """Fill the step with chunks: those that wait for their next one first, then new sequences while they fit."""
        chunks: list[Chunk] = []
        unfinished: list[Sequence] = []
        budget = self._max_tokens
        if self._forced:
            self._update_decoding()  # leaves them out before they join again
            self._filling.extend(self._forced)
            self._forced, self._forced_tokens = [], 0
        while budget:
            seq = self._filling.popleft() if self._filling else self._admit()
            if seq is None:
                break
            start = int(self._table.computed[seq.row])
            end = min(len(seq.fill), start + budget)
            budget -= end - start
            self._table.computed[seq.row] = end
            self._register(seq, start, end)
            branches = seq.branches if start < seq.prompt_length <= end else []
            if branches:
                self._fork(seq)
            chunks.append(Chunk(seq, start, end, branches))
            for filled in (seq, *branches):
                if self._table.computed[filled.row] < len(filled.fill):
                    unfinished.append(filled)
                elif not filled.scoring and filled.max_outputs > 1:
                    self._joining.append(filled)
        self._filling.extendleft(reversed(unfinished))
        self._stats.prefill_steps += bool(chunks)
        self._stats.computed_tokens += self._max_tokens - budget
        return Step(chunks, [], np.empty(0, np.int64), self._handover.copies()) if chunks else None

    def _decode_step(self, in_flight: bool) -> Step | None:
        """The next token of every decoding sequence, with a new page for those that need one."""
        while True:
            self._update_decoding()
            rows, table = self._decoding_rows, self._table
            if not len(rows):
                return None
            need = table.computed[rows] // self._limits.page_size >= table.num_pages[rows]
            if all(self._grow(self._decoding[index]) for index in np.flatnonzero(need)):
                table.computed[rows] += 1
                self._stats.decode_steps += 1
                return Step([], self._decoding, rows, NO_COPIES)
            if in_flight:
                return None
            self._preempt(max(self._decoding, key=lambda seq: seq.order))

    def _leave(self, seq: Sequence) -> None:
        if seq.max_outputs > 1:  # others never decode
            self._left.add(seq)

    def _update_decoding(self) -> None:
        """Take in who has filled. Leave out who has finished or has to fill, and whose last token is launched."""
        going = self._has_tokens(self._decoding_rows)
        if not self._joining and not self._left and going.all():
            return
        if self._left:  # their rows may have others by now
            going &= np.fromiter((seq not in self._left for seq in self._decoding), np.bool_, len(self._decoding))
        joining = [seq for seq in self._joining if seq.row >= 0 and len(seq.fill) <= self._table.computed[seq.row]]
        rows = np.array([seq.row for seq in joining], np.int64)
        still = self._has_tokens(rows)
        self._decoding = [*compress(self._decoding, going), *compress(joining, still)]
        self._decoding_rows = np.concatenate((self._decoding_rows[going], rows[still]))
        self._joining, self._left = [], set()

    def _has_tokens(self, rows: Ints) -> npt.NDArray[np.bool_]:
        """Whether each row has a token to compute in a decode step."""
        return self._table.computed[rows] <= self._table.last_position[rows]

    def _admit(self) -> Sequence | None:
        """Give the first waiting sequence a row and its prompt's pages, if it fits beside what is promised."""
        seq = self._waiting[0] if self._waiting else None
        if seq is None or self._table.num_free < 1 + len(seq.branches):
            self._refilling = False
            return None
        size = self._limits.page_size
        outputs = self._lengths.expect(seq)
        cached = self._pool.match(seq.page_hashes[: (seq.prompt_length - 1) // size])
        branch_pages = [self._pages(branch, outputs) - seq.prompt_length // size for branch in seq.branches]
        needed = self._pages(seq, outputs) - len(cached)
        if self._pool.num_free - self._promised < needed + sum(branch_pages):
            self._pool.release(cached)
            if not self._running and self._handover.drop():  # too few pages for both
                return self._admit()
            self._refilling = False
            return None
        self._waiting.popleft()
        self._running.add(seq)
        own = self._pool.allocate(num_pages(len(seq.fill), size) - len(cached))
        seq.promised = needed - len(own)
        for branch, pages in zip(seq.branches, branch_pages, strict=True):
            branch.promised = pages
        self._promised += seq.promised + sum(branch_pages)
        seq.order = self._admissions = self._admissions + 1
        table, cached_tokens = cached + own, len(cached) * size
        if seq.preempted:
            self._stats.recomputed_tokens += len(seq.fill) - cached_tokens
        else:
            if self._config.prefix_caching:
                cached_tokens += self._handover.take(seq, table, len(cached))
                if seq.request.in_order:
                    self._handover.hold(seq, table)
            seq.cached_tokens = cached_tokens
            if seq.is_first:
                self._stats.cached_tokens += cached_tokens
                if seq.scores:
                    seq.scores.cached_tokens = cached_tokens
            else:
                self._stats.recomputed_tokens += seq.prompt_length - cached_tokens
        self._table.place(seq, table, cached_tokens)
        return seq

    def _fork(self, leader: Sequence) -> None:
        """Give each branch a row with the leader's prompt: full pages are shared, the page it ends inside is copied."""
        full, rest = divmod(leader.prompt_length, self._limits.page_size)
        pages = self._table.pages(leader.row)
        for branch in leader.branches:
            self._pool.share(pages[:full])
            own = self._pool.allocate(num_pages(len(branch.fill), self._limits.page_size) - full)
            branch.promised -= len(own)
            self._promised -= len(own)
            branch.order, branch.cached_tokens = leader.order, leader.cached_tokens
            self._running.add(branch)
            self._table.place(branch, pages[:full] + own, leader.prompt_length)
            if rest:
                self._handover.copy(pages[full], own[0], rest)
        leader.branches = []

    def _register(self, seq: Sequence, start: int, end: int) -> None:
        """Make the pages that a chunk completes known, those of the prompt."""
        size = self._limits.page_size
        if self._config.prefix_caching:
            for index in range(start // size, min(end // size, len(seq.page_hashes))):
                self._pool.register(int(self._table.block_table[seq.row, index]), seq.page_hashes[index])

    def _grow(self, seq: Sequence) -> bool:
        """One more page for a sequence, from what it was promised or from what nobody was."""
        if seq.promised:
            seq.promised -= 1
            self._promised -= 1
        elif self._pool.num_free <= self._promised:
            return False
        self._table.append_pages(seq.row, self._pool.allocate(1))
        return True

    def _preempt(self, seq: Sequence) -> None:
        """Take a sequence's pages away. It comes back first of all, and computes its prompt and output so far again."""
        self._table.fetch_tokens(seq, self._table.num_drawn(seq.row))
        self._vacate(seq)
        self._leave(seq)
        seq.preempted = True
        seq.fill_outputs()
        self._waiting.appendleft(seq)
        self._stats.preemptions += 1

    def _vacate(self, seq: Sequence) -> None:
        for holder in (seq, *seq.branches):
            self._promised -= holder.promised
            holder.promised = 0
        self._pool.release(self._table.remove(seq))
        self._running.remove(seq)

    def _pages(self, seq: Sequence, outputs: int) -> int:
        """Pages of a sequence that draws `outputs` tokens: the last one's KV is never needed."""
        return num_pages(max(len(seq.fill), seq.prompt_length + outputs - 1), self._limits.page_size)
