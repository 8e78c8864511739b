"""Norm, rope, activation and page copies on the CPU, against formulas written out."""

import pytest
import torch

from batchgen_kernels import act_mul, copy_slots, qkv_rope_store, rms_norm


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_rms_norm_rounds_where_the_families_do(dtype):
    x, weight = torch.randn(4, 24).to(dtype), torch.randn(24).to(dtype)
    unit = x.float() / (x.float().pow(2).mean(-1, keepdim=True) + 1e-5).sqrt()
    wanted = {
        "cast_then_scale": weight * unit.to(dtype),
        "scale_then_cast": (weight.float() * unit).to(dtype),
        "one_plus": ((1 + weight.float()) * unit).to(dtype),
    }
    for order, value in wanted.items():
        result, same = rms_norm(x, weight, 1e-5, order=order)
        assert same is x
        torch.testing.assert_close(result, value, rtol=1e-5 if dtype == torch.float32 else 1e-2, atol=1e-6)


def test_rms_norm_adds_the_residual_in_the_models_dtype():
    x, residual = torch.randn(2, 4, 24).bfloat16()
    result, total = rms_norm(x, torch.ones(24).bfloat16(), 1e-6, residual=residual)
    assert torch.equal(total, x + residual)
    assert torch.equal(result, rms_norm(total, torch.ones(24).bfloat16(), 1e-6)[0])


def test_rms_norm_refuses_an_unknown_order():
    with pytest.raises(ValueError, match="'last', expected one of cast_then_scale"):
        rms_norm(torch.ones(1, 4), torch.ones(4), 1e-6, order="last")


def test_act_mul():
    gate, up = torch.randn(2, 5, 7)
    both = torch.cat((gate, up), dim=-1)
    torch.testing.assert_close(act_mul(both, "silu"), gate * torch.sigmoid(gate) * up)
    inner = 0.7978845608028654 * (gate + 0.044715 * gate**3)
    torch.testing.assert_close(act_mul(both, "gelu_tanh"), 0.5 * gate * (1 + torch.tanh(inner)) * up)
    with pytest.raises(ValueError, match="relu"):
        act_mul(both, "relu")


@pytest.mark.parametrize("half", [8, 5], ids=["whole head", "partial"])
def test_qkv_rope_store(half):
    """Rotation is a complex product; keys and values land at their slots and nowhere else."""
    num_q, num_kv, dim, tokens = 4, 2, 16, 6
    qkv = torch.randn(tokens, (num_q + 2 * num_kv) * dim)
    angles = torch.rand(50, half) * 6
    cos_sin = torch.stack((angles.cos(), angles.sin()), dim=1)
    positions, slots = torch.tensor([3, 4, 49, 0, 1, 2]), torch.tensor([9, 10, 31, 0, 16, 7])
    k_pages, v_pages = torch.full((4, num_kv, 8, dim), 7.0), torch.full((4, num_kv, 8, dim), 7.0)
    kwargs = {"num_q_heads": num_q, "num_kv_heads": num_kv, "head_dim": dim}
    q, k, v = qkv_rope_store(qkv, cos_sin, positions, slots, k_pages, v_pages, **kwargs)
    heads = qkv.view(tokens, -1, dim)
    turn = torch.polar(torch.ones(tokens, 1, half), angles[positions].unsqueeze(1))
    turned = torch.complex(heads[..., :half], heads[..., half : 2 * half]) * turn
    wanted = torch.cat((turned.real, turned.imag, heads[..., 2 * half :]), dim=-1)
    torch.testing.assert_close(q, wanted[:, :num_q])
    torch.testing.assert_close(k, wanted[:, num_q : num_q + num_kv])
    assert torch.equal(v, heads[:, num_q + num_kv :])
    assert torch.equal(k_pages[slots // 8, :, slots % 8], k)
    assert torch.equal(v_pages[slots // 8, :, slots % 8], v)
    assert int((k_pages == 7.0).all(-1).sum()) == (32 - tokens) * num_kv


def test_qk_norm_comes_before_the_rotation():
    weight = torch.rand(8) + 0.5
    qkv, pages = torch.randn(3, 24), torch.zeros(1, 1, 4, 8)
    angles = torch.rand(3, 4)
    cos_sin = torch.stack((angles.cos(), angles.sin()), dim=1)
    kwargs = {"num_q_heads": 1, "num_kv_heads": 1, "head_dim": 8}
    places = torch.arange(3)
    q, k, _ = qkv_rope_store(
        qkv, cos_sin, places, places, pages, pages.clone(), **kwargs, q_norm=weight, k_norm=weight * 2
    )
    normed = torch.cat(
        [rms_norm(qkv[:, :8], weight, 1e-6)[0], rms_norm(qkv[:, 8:16], weight * 2, 1e-6)[0], qkv[:, 16:]], 1
    )
    wanted_q, wanted_k, _ = qkv_rope_store(normed, cos_sin, places, places, pages, pages.clone(), **kwargs)
    torch.testing.assert_close(q, wanted_q)
    torch.testing.assert_close(k, wanted_k)


def test_copy_slots():
    """Token 1 of page 0 to token 3 of page 4, token 2 of page 3 to token 0 of page 1; the rest stays."""
    k, v = torch.randn(5, 2, 4, 8), torch.randn(5, 2, 4, 8)
    before = k.clone(), v.clone()
    copy_slots(k, v, torch.tensor([[1, 14], [19, 4]]))
    for pages, old in zip((k, v), before, strict=True):
        old[4, :, 3], old[1, :, 0] = old[0, :, 1], old[3, :, 2]
        assert torch.equal(pages, old)


def test_slots_to_copy_are_checked():
    pages = torch.randn(5, 2, 4, 8)
    with pytest.raises(ValueError, match=r"copies: dtype torch.int32"):
        copy_slots(pages, pages.clone(), torch.zeros(2, 3, dtype=torch.int32))
