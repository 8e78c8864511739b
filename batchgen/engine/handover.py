"""What a sequence hands over to the next one: whole pages of KV, and the tokens that both have inside a page."""

import numpy as np

from batchgen.engine.config import LEAST_COPIED, num_pages
from batchgen.engine.kv_cache import PagePool
from batchgen.engine.sequence import Ints, Sequence
from batchgen.engine.step import NO_COPIES


class Handover:
    """Holds what a request has in common with the next one until that one is admitted, whoever finishes in between.

    Whole pages are shared. Of a page that two prompts share a part of, the next sequence gets a copy: the slots that a
    step copies are listed here while it is planned. Every layer writes the step's own keys and values, then copies,
    then attends, so tokens that are only computed in this step can be copied in it; and what is itself a copy of this
    step's is taken from where it comes from.
    """

    def __init__(self, pool: PagePool, page_size: int) -> None:
        self._pool, self._page_size = pool, page_size
        self._giver: Sequence | None = None
        self._held: list[int] = []
        self._sources: list[int] = []
        self._origins: dict[int, Ints] = {}
        self._copies: list[Ints] = []

    @property
    def pages(self) -> list[int]:
        """All pages that are kept from being freed here."""
        return self._held + self._sources

    def begin_step(self) -> None:
        """Start a list of copies. The last step is launched by now: what it copies from may be written again."""
        self._pool.release(self._sources)
        self._sources, self._origins, self._copies = [], {}, []

    def copies(self) -> Ints:
        """int64 [2, N]: the slots to copy in this step, from and to."""
        return np.concatenate(self._copies, axis=1) if self._copies else NO_COPIES

    def hold(self, giver: Sequence, pages: list[int]) -> None:
        """Keep what the next sequence shares with this one, which has these pages, and let go of what was kept."""
        kept = pages[: num_pages(min(giver.kept_tokens, giver.prompt_length), self._page_size)]
        self._pool.share(kept)
        self._pool.release(self._held)
        self._giver, self._held = giver, kept

    def drop(self) -> bool:
        """Keep nothing any longer; whether anything was kept."""
        held, self._giver, self._held = self._held, None, []
        self._pool.release(held)
        return bool(held)

    def take(self, seq: Sequence, pages: list[int], cached: int) -> int:
        """Copy what a new sequence shares with the giver beyond its `cached` pages; the number of tokens.

        A prompt's last token is not among them: it is computed, since its logits are wanted.
        """
        giver, start = self._giver, cached * self._page_size
        if giver is None or cached >= len(self._held) or not self._same_pages(giver, seq, cached):
            return 0
        end = min(start + self._page_size, giver.kept_tokens, giver.prompt_length, seq.prompt_length - 1)
        differs = giver.fill[start:end] != seq.fill[start:end]
        count = int(differs.argmax()) if differs.any() else max(0, end - start)
        if count < LEAST_COPIED:
            return 0
        self.copy(self._held[cached], pages[cached], count)
        return count

    @staticmethod
    def _same_pages(giver: Sequence, seq: Sequence, count: int) -> bool:
        """Whether both prompts begin with the same `count` pages: a page's hash is chained to those before it."""
        return count == 0 or giver.page_hashes[count - 1] == seq.page_hashes[count - 1]

    def copy(self, source: int, target: int, count: int) -> None:
        """Copy the first `count` tokens of a page onto another one in this step."""
        slots = np.arange(count)
        from_ = source * self._page_size + slots
        origins = self._origins.get(source)
        if origins is not None:
            from_[: len(origins)] = origins[:count]
        self._origins[target] = from_
        self._pool.share([source])
        self._sources.append(source)
        self._copies.append(np.stack((from_, target * self._page_size + slots)))
