"""The CrossAttentionDecoder module."""

import torch

from compgen_fast.models import CrossAttentionDecoder

SMALL = {"heads": 2, "head_dim": 5, "query_dim": 12, "slot_hidden": 20, "octaves": 3}


def test_a_subset_of_pixels_decodes_as_in_the_whole_image() -> None:
    decoder, z = CrossAttentionDecoder(8, 6, **SMALL), torch.randn(2, 3, 8)
    chosen = torch.tensor([35, 0, 7])
    torch.testing.assert_close(decoder(z, pixels=chosen), decoder(z)[:, chosen])
    assert decoder(z).shape == (2, decoder.num_pixels, 3) == (2, 36, 3)


def test_the_order_of_slots_does_not_matter() -> None:
    decoder, z = CrossAttentionDecoder(8, 6, **SMALL), torch.randn(2, 5, 8)
    torch.testing.assert_close(decoder(z[:, torch.randperm(5)]), decoder(z))


def test_every_parameter_is_trained() -> None:
    decoder = CrossAttentionDecoder(8, 6, **SMALL)
    decoder(torch.randn(2, 3, 8)).square().sum().backward()
    assert all(p.grad is not None and (p.grad != 0).any() for p in decoder.parameters())


def test_the_defaults_are_the_papers_sizes() -> None:
    decoder = CrossAttentionDecoder(32, 128)
    assert decoder.num_pixels == 16384
    assert decoder.layers[0].to_q.weight.shape == (516, 180)
    assert decoder.embed_slots[0].out_features == 2064
    assert decoder.get_buffer("positions").shape == (16384, 32)


def test_masks_are_the_attention_averaged_over_layers_and_heads() -> None:
    decoder, z = CrossAttentionDecoder(8, 6, layers=2, **SMALL), torch.randn(2, 3, 8)
    slots, x, weights = decoder.embed_slots(z), decoder.embed_pixels(decoder.positions)[None], []
    for layer in decoder.layers:
        q = layer.to_q(layer.norm_attention(x)).unflatten(-1, (2, 5)).expand(2, -1, -1, -1)
        k = layer.to_k(slots).unflatten(-1, (2, 5))
        weights.append((torch.einsum("bnhd,bkhd->bhkn", q, k) * 5**-0.5).softmax(2).mean(1))
        x = layer(x, slots)
    colours, masks = decoder.decode_with_masks(z)
    torch.testing.assert_close(masks, (weights[0] + weights[1]) / 2)
    torch.testing.assert_close(masks.sum(1), torch.ones(2, 36))
    torch.testing.assert_close(colours, decoder(z))


def test_masks_carry_gradient_to_the_slots() -> None:
    z = torch.randn(2, 3, 8, requires_grad=True)
    _, masks = CrossAttentionDecoder(8, 6, **SMALL).decode_with_masks(z, torch.tensor([3, 4]))
    masks.square().sum().backward()
    assert masks.shape == (2, 3, 2) and z.grad is not None and (z.grad != 0).any()
