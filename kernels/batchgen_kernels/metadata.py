"""What attention is told about a step."""

from typing import NamedTuple

from torch import Tensor


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
