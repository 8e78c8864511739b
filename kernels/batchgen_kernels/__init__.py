"""The ops of batchgen: a torch reference, a CPU path and a Triton kernel each, chosen by the tensors' device."""

from batchgen_kernels.activation import act_mul
from batchgen_kernels.attention import paged_attention
from batchgen_kernels.attention_work import SharedRuns, WorkArrays, WorkRoom, decode_work
from batchgen_kernels.bitmask import apply_bitmask
from batchgen_kernels.filter import filter_logits, filtered_sample
from batchgen_kernels.logprobs import TokenLogprobs, chosen_logprobs, token_logprobs
from batchgen_kernels.metadata import AttentionMetadata, DecodeWork, TokenTree
from batchgen_kernels.norm import rms_norm
from batchgen_kernels.pages import copy_slots
from batchgen_kernels.penalties import penalize
from batchgen_kernels.rope import QKV, qkv_rope_store
from batchgen_kernels.sample import gumbel_sample

__all__ = [
    "QKV",
    "AttentionMetadata",
    "DecodeWork",
    "SharedRuns",
    "TokenLogprobs",
    "TokenTree",
    "WorkArrays",
    "WorkRoom",
    "act_mul",
    "apply_bitmask",
    "chosen_logprobs",
    "copy_slots",
    "decode_work",
    "filter_logits",
    "filtered_sample",
    "gumbel_sample",
    "paged_attention",
    "penalize",
    "qkv_rope_store",
    "rms_norm",
    "token_logprobs",
]
