"""The pool of KV pages: who uses which, and which hold a known prefix. Only page ids here, no tensors."""

import hashlib
from collections import Counter, OrderedDict
from collections.abc import Callable, Iterable, Sequence

import numpy as np
import numpy.typing as npt

from batchgen.errors import InternalError

PADDING_PAGE = 0
"""Never allocated: block tables are padded with it."""


def page_hashes(token_ids: npt.NDArray[np.int32], page_size: int, known: Sequence[bytes] = ()) -> list[bytes]:
    """Hash of each full page of a prompt, each one chained to all tokens before it. `known` are the first ones."""
    hashes, page_bytes, data = list(known), 4 * page_size, token_ids.tobytes()
    previous = hashes[-1] if hashes else b""
    for end in range((len(hashes) + 1) * page_bytes, len(data) + 1, page_bytes):
        previous = hashlib.blake2b(previous + data[end - page_bytes : end], digest_size=16).digest()
        hashes.append(previous)
    return hashes


def common_pages(one: npt.NDArray[np.int32], other: npt.NDArray[np.int32], page_size: int) -> int:
    """Full pages that two prompts begin with alike."""
    count = min(len(one), len(other)) // page_size
    pages = (prompt[: count * page_size].reshape(count, page_size) for prompt in (one, other))
    differs = (next(pages) != next(pages)).any(1)
    return int(differs.argmax()) if differs.any() else count


class PagePool:
    """Pages with reference counts. A page is used, cached (unused, but its content is known) or free.

    `on_drop` is told of pages whose content is gone.
    """

    def __init__(self, num_pages: int, on_drop: Callable[[list[int]], None] | None = None) -> None:
        self.num_pages = num_pages
        self._on_drop = on_drop
        self._refs = [0] * num_pages
        self._free = list(range(num_pages - 1, PADDING_PAGE, -1))
        self._page_of: dict[bytes, int] = {}
        self._hash_of: dict[int, bytes] = {}
        self._cached: OrderedDict[int, None] = OrderedDict()  # least recently used first

    @property
    def num_free(self) -> int:
        """Pages that `allocate` can give: free ones, and cached ones that it would evict."""
        return len(self._free) + len(self._cached)

    @property
    def num_used(self) -> int:
        """Pages that some sequence uses."""
        return self.num_pages - 1 - self.num_free

    def allocate(self, count: int) -> list[int]:
        """`count` pages of the caller's own. Free ones go first, then the least recently used cached ones."""
        if count > self.num_free:
            raise InternalError(f"{count} KV pages asked for with {self.num_free} free: admission must check before")
        evicted = [self._cached.popitem(last=False)[0] for _ in range(count - len(self._free))]
        for page in evicted:
            del self._page_of[self._hash_of.pop(page)]
        if evicted and self._on_drop:
            self._on_drop(evicted)
        pages = [self._free.pop() for _ in range(count - len(evicted))] + evicted
        for page in pages:
            self._refs[page] = 1
        return pages

    def match(self, hashes: Sequence[bytes]) -> list[int]:
        """The longest run of pages, from the first on, that hold these hashes; the caller now uses them."""
        pages = []
        for page_hash in hashes:
            page = self._page_of.get(page_hash)
            if page is None:
                break
            pages.append(page)
        self.share(pages)
        return pages

    def share(self, pages: Iterable[int]) -> None:
        """One more user of each of these pages."""
        for page in pages:
            if self._refs[page] == 0:
                del self._cached[page]
            self._refs[page] += 1

    def register(self, page: int, page_hash: bytes) -> None:
        """Make a used page known by its content. Where a page with that content is known already, that one stays.

        Called when the step that fills the page is planned: steps run in order, and within a step every layer writes
        its keys and values before it reads any, so sequences of the same step can share the page already.
        """
        if page_hash not in self._page_of and page not in self._hash_of:
            self._page_of[page_hash] = page
            self._hash_of[page] = page_hash

    def release(self, pages: Sequence[int]) -> None:
        """One user less of each page. Pages of a sequence come in order, so that a prefix is evicted from its end."""
        dropped = []
        for page in reversed(pages):
            if self._refs[page] <= 0:
                raise InternalError(f"KV page {page} was released by someone who does not use it")
            self._refs[page] -= 1
            if self._refs[page]:
                continue
            if page in self._hash_of:
                self._cached[page] = None
            else:
                self._free.append(page)
                dropped.append(page)
        if dropped and self._on_drop:
            self._on_drop(dropped)

    def check(self, tables: Iterable[Sequence[int]]) -> None:
        """Raise InternalError unless every page is one of used, cached and free, and `tables` are all the users."""
        used = Counter(page for table in tables for page in table)
        for page in range(1, self.num_pages):
            if self._refs[page] != used[page]:
                raise InternalError(
                    f"KV page {page} has {self._refs[page]} users on record, but {used[page]} tables hold it"
                )
        states = [*self._free, *self._cached, *used]
        if sorted(states) != list(range(1, self.num_pages)):
            raise InternalError(f"KV pages are lost or doubled: {len(states)} accounted for of {self.num_pages - 1}")
        if {page: page_hash for page_hash, page in self._page_of.items()} != self._hash_of:
            raise InternalError("the two directions of the KV prefix index disagree")
        if any(page not in self._hash_of for page in self._cached):
            raise InternalError("a cached KV page has no known content")
