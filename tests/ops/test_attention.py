"""Paged attention on the CPU against a float64 reference that knows neither batches nor sharing."""

import pytest
import torch

from batchgen_kernels import AttentionMetadata, TokenTree, paged_attention
from batchgen_kernels.attention import reference
from batchgen_kernels.attention_plan import make_plan

STEPS = {  # query lengths, KV lengths, pages that all sequences begin with
    "decode": ([1] * 7, [5, 100, 33, 64, 16, 1, 130], 0),
    "prefill": ([40, 300, 10, 1], [40, 300, 64, 17], 0),
    "shared": ([1, 5, 90, 1, 150], [200, 210, 250, 190, 300], 10),
    "long shared": ([1, 3, 2, 1, 180, 200], [600] * 4 + [700, 1500], 33),
}
VARIANTS = {
    "plain": {},
    "window": {"window": 20},
    "window and softcap": {"window": 130, "softcap": 3.0},
    "softcap": {"softcap": 5.0},
    "sinks": {"sinks": torch.tensor([0.0, 1.0, 5.0, -3.0, 0.5, 2.0])},
}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64], ids=str)
@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("step", STEPS)
def test_equals_the_reference(make_step, close, step, variant, dtype):
    query_lens, kv_lens, shared_pages = STEPS[step]
    q, k, v, meta = make_step(query_lens, kv_lens, dtype=dtype, shared_pages=shared_pages)
    wide = (x.double().nan_to_num() for x in (q, k, v))
    wanted = reference(*wide, meta, 0.17, **VARIANTS[variant])
    close("attention", paged_attention(q, k, v, meta, scale=0.17, **VARIANTS[variant]), wanted)


TREES = {  # query lengths, KV lengths, sizes of the trees
    "behind short prompts": ([20, 60, 9, 40], [20, 60, 9, 40], [7, 30, 0, 39]),
    "behind long prompts": ([300, 400, 10, 200], [300, 460, 310, 200], [20, 250, 40, 0]),
    "token by token": ([1] * 6, [700, 700, 90, 33, 5, 64], [40, 3, 30, 33, 0, 1]),
    "shared": ([30, 30, 40, 1, 50], [700, 710, 720, 690, 500], [30, 60, 17, 600, 20]),
}


@pytest.mark.parametrize("softcap", [None, 5.0])
@pytest.mark.parametrize("step", TREES)
def test_a_node_of_a_tree_sees_its_ancestors_alone(make_step, with_tree, close, step, softcap):
    query_lens, kv_lens, sizes = TREES[step]
    q, k, v, meta = make_step(query_lens, kv_lens, shared_pages=20)
    meta = with_tree(meta, sizes)
    wanted = reference(*(x.double().nan_to_num() for x in (q, k, v)), meta, 0.17, None, softcap)
    result = paged_attention(q, k, v, meta, scale=0.17, softcap=softcap)
    close("attention", result, wanted)
    assert not torch.allclose(result, paged_attention(q, k, v, meta._replace(tree=None), scale=0.17, softcap=softcap))


def test_the_reference_of_a_tree_is_each_path_alone(make_step):
    """Two branches behind a prompt of 3: tokens 3, 4 and 5, 6. The second equals the prompt with 5 and 6 alone."""
    q, k, v, meta = make_step([7], [7], page_size=8)
    tree = TokenTree(torch.tensor([3]).int(), torch.tensor([[5, 5, 7, 7]]).int())
    keep = torch.tensor([0, 1, 2, 5, 6])
    alone = AttentionMetadata(meta.block_table, torch.tensor([0, 5]).int(), torch.tensor([5]).int(), 5, 5)
    (page,) = meta.block_table[0].tolist()
    k_path, v_path = k.clone(), v.clone()
    k_path[page, :, :5], v_path[page, :, :5] = k[page][:, keep], v[page][:, keep]
    wanted = reference(q[keep], k_path, v_path, alone, 0.2)
    torch.testing.assert_close(reference(q, k, v, meta._replace(tree=tree), 0.2)[keep], wanted)


@pytest.mark.parametrize("heads", [(1, 1, 8), (9, 3, 64), (4, 4, 80), (14, 2, 64)])
def test_head_counts_and_sizes(make_step, close, heads):
    q, k, v, meta = make_step([1, 30, 1, 200], [77, 30, 16, 210], heads)
    wanted = reference(*(x.double().nan_to_num() for x in (q, k, v)), meta, 0.1)
    close("attention", paged_attention(q, k, v, meta, scale=0.1), wanted)


def test_shared_pages_are_one_product(make_step):
    """Four sequences with 20 pages in common: one piece for those, another for what each has of its own."""
    *_, meta = make_step([1] * 4, [700] * 4, shared_pages=20)
    plan = make_plan(meta, 16, None)
    assert [(piece.tokens.tolist(), piece.num_keys) for piece in plan.shared] == [([[0, 1, 2, 3]], 320)]
    assert [(piece.tokens.shape, piece.num_keys) for piece in plan.base] == [((4, 1), 380)]


def test_sharing_has_levels(make_step, close):
    q, k, v, meta = make_step([1] * 6, [1300] * 6, shared_pages=40)
    table = meta.block_table.clone()
    table[3:, 40:80] = table[3, 40:80]
    meta = meta._replace(block_table=table)
    plan = make_plan(meta, 16, None)
    runs = {tuple(piece.tokens.flatten().tolist()): piece.num_keys for piece in plan.shared}
    assert runs == {(0, 1, 2, 3, 4, 5): 640, (3, 4, 5): 640}
    k, v = k.nan_to_num(), v.nan_to_num()
    close("attention", paged_attention(q, k, v, meta, scale=0.1), reference(q.double(), k, v, meta, 0.1))


def test_little_sharing_is_left_alone(make_step):
    *_, meta = make_step([1, 1], [100, 100], shared_pages=6)
    assert not make_plan(meta, 16, None).shared


def test_a_sequence_depends_on_itself_alone(make_step):
    """In float32, to rounding: the same tokens win, alone and in any company."""
    q, k, v, meta = make_step([1] * 8, [400, 90, 33, 64, 400, 1, 130, 399], shared_pages=20)
    together = paged_attention(q, k, v, meta, scale=0.2)
    for i, length in enumerate(meta.kv_lens.tolist()):
        alone = AttentionMetadata(
            meta.block_table[i : i + 1], torch.tensor([0, 1]).int(), meta.kv_lens[i : i + 1], 1, length
        )
        torch.testing.assert_close(
            paged_attention(q[i : i + 1], k, v, alone, scale=0.2)[0], together[i], rtol=1e-5, atol=1e-6
        )


def test_chunks_give_what_the_whole_prompt_gives(make_step):
    q, k, v, meta = make_step([300], [300])
    whole = paged_attention(q, k, v, meta, scale=0.2)
    for first, last in ((0, 7), (7, 150), (150, 299), (299, 300)):
        size = last - first
        chunk = AttentionMetadata(
            meta.block_table, torch.tensor([0, size]).int(), torch.tensor([last]).int(), size, last
        )
        part = paged_attention(q[first:last], k, v, chunk, scale=0.2)
        torch.testing.assert_close(part, whole[first:last], rtol=1e-5, atol=1e-6)


def test_a_changed_table_is_seen(make_step):
    """The plan of a step is kept between layers, but not when its tensors change in place."""
    q, k, v, meta = make_step([1, 1], [64, 64])
    before = paged_attention(q, k, v, meta, scale=0.2)
    meta.block_table.copy_(meta.block_table.flip(0))
    after = paged_attention(q, k, v, meta, scale=0.2)
    assert not torch.allclose(before, after)
    torch.testing.assert_close(after, reference(q, k, v, meta, 0.2), rtol=1e-4, atol=1e-5)
