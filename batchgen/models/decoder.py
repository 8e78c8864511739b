"""The decoder of the Llama, Mistral, Qwen2 and Qwen3 families, driven by ModelConfig, over a paged KV cache.

Sequences lie one after another in a flat batch of T tokens. Nothing here waits for the device or looks at its data, so
a step can be captured in a CUDA graph.
"""

import torch
import torch.nn.functional as F  # noqa: N812 - the name everyone knows
from torch import Tensor, nn

from batchgen.models.config import ModelConfig
from batchgen.models.invariant import make_batch_invariant
from batchgen.models.linear import Linear, NewParameter
from batchgen.models.rope_table import cos_sin_table
from batchgen_kernels import (
    AttentionMetadata,
    TokenTree,
    act_mul,
    copy_slots,
    paged_attention,
    qkv_rope_store,
    rms_norm,
)

KVPages = tuple[Tensor, Tensor]


class Attention(nn.Module):
    """Grouped-query attention with rotary positions: one fused projection, one page write, one attention call."""

    def __init__(self, config: ModelConfig, window: int | None, new: NewParameter) -> None:
        super().__init__()
        self.config, self.window = config, window
        self.qkv = Linear(new, config.hidden_size, config.q_size + 2 * config.kv_size, config.qkv_bias)
        self.o = Linear(new, config.q_size, config.hidden_size, config.o_bias)
        self.q_norm = new(config.head_dim) if config.qk_norm else None
        self.k_norm = new(config.head_dim) if config.qk_norm else None
        self.rows_alone = False
        """Whether listed rows attend by themselves even if they are most of the tokens."""

    def forward(
        self,
        x: Tensor,
        positions: Tensor,
        slots: Tensor,
        cos_sin: Tensor,
        kv: KVPages,
        meta: AttentionMetadata,
        rows: Tensor | None,
    ) -> Tensor:
        """Write the keys and values of all tokens; return the output `[T or S, H]` of the tokens in `rows`."""
        config = self.config
        q, _, _ = qkv_rope_store(
            self.qkv(x),
            cos_sin,
            positions,
            slots,
            *kv,
            num_q_heads=config.num_q_heads,
            num_kv_heads=config.num_kv_heads,
            head_dim=config.head_dim,
            q_norm=self.q_norm,
            k_norm=self.k_norm,
            eps=config.rms_eps,
            norm_order=config.norm_order,
        )
        if meta.copies is not None:
            copy_slots(*kv, meta.copies)
        if rows is not None and (self.rows_alone or rows.shape[0] * 2 <= x.shape[0]):
            q, meta, rows = q[rows], _metadata_of_rows(meta, rows), None
        out = paged_attention(q, *kv, meta, scale=config.head_dim**-0.5, window=self.window)
        return self.o((out if rows is None else out[rows]).flatten(1))  # type: ignore[no-any-return]


def _metadata_of_rows(meta: AttentionMetadata, rows: Tensor) -> AttentionMetadata:
    """See every listed token as a sequence of its own with one query: it may stand anywhere in its prompt."""
    sequences = torch.searchsorted(meta.query_start, rows.to(torch.int32), right=True) - 1
    behind = meta.query_start[sequences + 1] - 1 - rows
    return AttentionMetadata(
        block_table=meta.block_table[sequences],
        query_start=torch.arange(rows.shape[0] + 1, dtype=torch.int32, device=rows.device),
        kv_lens=(meta.kv_lens[sequences] - behind).to(torch.int32),
        max_query_len=1,
        max_kv_len=meta.max_kv_len,
        tree=meta.tree and TokenTree(meta.tree.start[sequences], meta.tree.until[sequences]),
    )


class Layer(nn.Module):
    """Attention and a gated MLP, each behind a norm."""

    def __init__(self, config: ModelConfig, window: int | None, new: NewParameter) -> None:
        super().__init__()
        self.config = config
        self.input_norm = new(config.hidden_size)
        self.attention = Attention(config, window, new)
        self.post_norm = new(config.hidden_size)
        self.gate_up = Linear(new, config.hidden_size, 2 * config.intermediate_size, config.mlp_bias)
        self.down = Linear(new, config.intermediate_size, config.hidden_size, config.mlp_bias)

    def forward(
        self,
        x: Tensor,
        residual: Tensor | None,
        positions: Tensor,
        slots: Tensor,
        cos_sin: Tensor,
        kv: KVPages,
        meta: AttentionMetadata,
        rows: Tensor | None = None,
    ) -> tuple[Tensor, Tensor]:
        """Return the layer's output and the residual that it is to be added to, for the tokens in `rows`."""
        eps, order = self.config.rms_eps, self.config.norm_order
        x, residual = rms_norm(x, self.input_norm, eps, residual=residual, order=order)
        x = self.attention(x, positions, slots, cos_sin, kv, meta, rows)
        residual = residual if rows is None else residual[rows]
        x, residual = rms_norm(x, self.post_norm, eps, residual=residual, order=order)
        return self.down(act_mul(self.gate_up(x), self.config.act)), residual


class Model(nn.Module):
    """A decoder with its language model head. Made with empty weights; see load.py."""

    def __init__(
        self, config: ModelConfig, *, device: torch.device, dtype: torch.dtype, max_length: int | None = None
    ) -> None:
        super().__init__()
        self.config = config
        self.device = device
        self.dtype = dtype
        new = NewParameter(device, dtype)
        self.embed = new(config.vocab_size, config.hidden_size)
        self.max_length = max_length or config.max_positions
        # A window that holds every sequence hides nothing.
        windows = (window if window and window < self.max_length else None for window in config.layer_windows)
        self.layers = nn.ModuleList(Layer(config, window, new) for window in windows)
        self.norm = new(config.hidden_size)
        self.lm_head = Linear(new, config.hidden_size, config.vocab_size)
        if config.tie_embeddings:
            self.lm_head.weight = self.embed
        tables = {rope: cos_sin_table(rope, self.max_length, device) for rope in set(config.layer_ropes)}
        self.cos_sin = [tables[rope] for rope in config.layer_ropes]

    def forward(
        self,
        token_ids: Tensor,
        positions: Tensor,
        slots: Tensor,
        kv: list[KVPages],
        meta: AttentionMetadata,
        rows: Tensor | None,
    ) -> Tensor:
        """Run T tokens (int64 ids, positions, slots) and write their KV; return the normed hidden states `[S, H]`.

        `rows` (int64 `[S]`, indices into the flat batch) are the tokens whose hidden states are wanted; None is all of
        them. In the last layer the others get their keys and values written, and neither attention nor MLP.
        """
        x, residual = F.embedding(token_ids, self.embed), None
        last = len(self.layers) - 1
        for index, layer in enumerate(self.layers):
            wanted = rows if index == last else None
            x, residual = layer(x, residual, positions, slots, self.cos_sin[index], kv[index], meta, wanted)
        return rms_norm(x, self.norm, self.config.rms_eps, residual=residual, order=self.config.norm_order)[0]

    def logits(self, hidden: Tensor) -> Tensor:
        """Return `[S, vocab_size]` in the model's dtype."""
        return self.lm_head(hidden)  # type: ignore[no-any-return]

    @property
    def kv_bytes_per_token(self) -> int:
        """Bytes that one token takes in the KV cache, over all layers."""
        return 2 * self.config.num_layers * self.config.kv_size * self.dtype.itemsize

    def make_batch_invariant(self) -> None:
        """Let nothing but a row itself have a say in its bits, on a GPU. Raises EngineError where that can't be had."""
        for module in self.modules():
            if isinstance(module, Attention):
                module.rows_alone = True
        make_batch_invariant(module for module in self.modules() if isinstance(module, Linear))

    def untie(self) -> None:
        """Give the head weights of its own."""
        self.lm_head.weight = nn.Parameter(torch.empty_like(self.embed), requires_grad=False)

    def pack(self) -> None:
        """Lay all weights out for the CPU. They can't be loaded or read any more."""
        for module in self.modules():
            if isinstance(module, Linear):
                module.pack()

    def checkpoint_tensors(self) -> dict[str, Tensor]:
        """Map each tensor name of a checkpoint (without `model.` in front) to the place where its values belong."""
        config = self.config
        tensors: dict[str, Tensor | None] = {"embed_tokens.weight": self.embed, "norm.weight": self.norm}
        if self.lm_head.weight is not self.embed:
            tensors["lm_head.weight"] = self.lm_head.weight
        heads = [config.q_size, config.kv_size, config.kv_size]
        for index, layer in enumerate(self.layers):
            assert isinstance(layer, Layer)
            attention, prefix = layer.attention, f"layers.{index}."
            tensors[prefix + "input_layernorm.weight"] = layer.input_norm
            tensors[prefix + "post_attention_layernorm.weight"] = layer.post_norm
            tensors[prefix + "self_attn.q_norm.weight"] = attention.q_norm
            tensors[prefix + "self_attn.k_norm.weight"] = attention.k_norm
            for name in ("weight", "bias"):
                qkv, gate_up = getattr(attention.qkv, name), getattr(layer.gate_up, name)
                for part, tensor in zip("qkv", qkv.split(heads) if qkv is not None else (), strict=False):
                    tensors[f"{prefix}self_attn.{part}_proj.{name}"] = tensor
                for part, tensor in zip(("gate", "up"), gate_up.chunk(2) if gate_up is not None else (), strict=False):
                    tensors[f"{prefix}mlp.{part}_proj.{name}"] = tensor
                tensors[f"{prefix}self_attn.o_proj.{name}"] = getattr(attention.o, name)
                tensors[f"{prefix}mlp.down_proj.{name}"] = getattr(layer.down, name)
        return {name: tensor for name, tensor in tensors.items() if tensor is not None}
