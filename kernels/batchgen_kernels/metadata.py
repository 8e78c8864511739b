"""What attention is told about a step."""

from typing import NamedTuple

from torch import Tensor


class AttentionMetadata(NamedTuple):
    """Where each of the B sequences of a step has its queries and its KV. All on the queries' device."""

    block_table: Tensor  # int32 [B, max_pages]: page ids, padded with 0
    query_start: Tensor  # int32 [B + 1]: first token of each sequence in the flat batch
    kv_lens: Tensor  # int32 [B]: KV length of each sequence after this step's tokens are written
    max_query_len: int
    max_kv_len: int
