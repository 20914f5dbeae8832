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
