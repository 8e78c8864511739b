"""What attention is told about a step."""

from typing import NamedTuple

import torch
from torch import Tensor


class TokenTree(NamedTuple):
    """Sequences that end in a tree of tokens in preorder: a node sees what lies before the tree, and its ancestors.

    That a node is an ancestor of those in its subtree is all that has to be said: they are the ones right behind it.
    """

    start: Tensor  # int32 [B]: where in its KV each sequence's tree begins
    until: Tensor  # int32 [B, N]: where in the KV the subtree of each node ends; padded with anything larger

    def seen_until(self, sequences: Tensor, keys: Tensor) -> Tensor:
        """int32 [n, L]: the position from which on queries do not see the keys at positions [n, L] of n sequences."""
        nodes = keys - self.start[sequences].unsqueeze(1)
        inside = (nodes >= 0) & (nodes < self.until.shape[1])
        until = self.until[sequences].gather(1, nodes.clamp(0, self.until.shape[1] - 1))
        return until.masked_fill(~inside, torch.iinfo(torch.int32).max)


class DecodeWork(NamedTuple):
    """The work of a decode step of B rows, as attention_work.py makes it. int32, on the queries' device."""

    items: Tensor
    """[N, 4]: row, first key, last key + 1, and which part of the row's result this is. Without keys: nothing to do."""
    row_parts: Tensor
    """[B, 4]: where a row's parts begin, how many they are, how many of them are of shared keys (the first ones), and
    the length of its own splits."""
    shared_items: Tensor
    """[S, 5]: first place in `members`, number of rows, first key, last key + 1, part. S = 0: nothing is shared."""
    members: Tensor
    """[R]: the rows that share keys, block by block."""
    arrivals: Tensor
    """[B, Hkv]: how many own parts are written. Zeros; every launch leaves them so."""
    num_parts: int
    """Parts there is to be room for."""


class AttentionMetadata(NamedTuple):
    """Where each of the B sequences of a step has its queries and its KV. All on the queries' device."""

    block_table: Tensor  # int32 [B, max_pages]: page ids, padded with 0
    query_start: Tensor  # int32 [B + 1]: first token of each sequence in the flat batch
    kv_lens: Tensor  # int32 [B]: KV length of each sequence after this step's tokens are written
    max_query_len: int
    max_kv_len: int
    work: DecodeWork | None = None
    """Of a decode step on a GPU. None: made from `kv_lens` on the device, with room for `max_kv_len` in every row."""
    tree: TokenTree | None = None  # not together with a window
    copies: Tensor | None = None
    """int64 [2, N]: slots whose KV is copied to others, from and to, as soon as a layer has written the step's own."""
