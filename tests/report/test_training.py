import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from compgen_fast.generate import build as generators
from compgen_fast.generate.config import MaskGITConfig, TrunkConfig
from compgen_fast.models.build import build
from compgen_fast.models.config import DecoderConfig, EncoderConfig, SlotVAEConfig, VQVAEConfig
from compgen_fast.models.tokenizer import VQVAE
from compgen_fast.report import training
from compgen_fast.report.page import PAGE, PICTURE
from compgen_fast.report.training import write
from compgen_fast.worlds.source import Factor


def test_a_run_becomes_a_page_with_its_numbers_and_a_picture(tmp_path: Path) -> None:
    rows = [{"step": step, "loss": 2.0 / (step + 1), "mse": 0.5, "validation_loss": 1.0} for step in range(3)]
    (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (tmp_path / "config.json").write_text('{"seed": "<7>"}')
    small = DecoderConfig(heads=2, head_dim=4, query_dim=8, slot_hidden=8)
    encoder = EncoderConfig(width=8, slot_layers=1, slot_heads=2)
    model = build(SlotVAEConfig(image_size=16, slots=3, slot_dim=4, encoder=encoder, decoder=small))
    images = torch.randint(0, 256, (9, 16, 16, 3), dtype=torch.uint8)
    page = write(tmp_path, model, images)
    assert page == tmp_path / PAGE
    assert "Changed on the way" not in page.read_text()
    assert "0.666667" in page.read_text() and "&lt;7&gt;" in page.read_text()
    assert (tmp_path / PICTURE).read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize(("overlap", "told"), [(1.0, True), (0.1, False)])
def test_a_page_says_what_is_wrong_with_the_model_and_what_was_changed_on_the_way(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, overlap: float, told: bool
) -> None:
    (tmp_path / "metrics.jsonl").write_text('{"step": 0, "loss": 1.0}\n')
    (tmp_path / "config.json").write_text("{}")
    change = {"name": "optimiser.lr", "was": 0.1, "now": 0.2}
    (tmp_path / "history.jsonl").write_text(json.dumps({"step": 7, "time": 1.0, "changes": [change]}) + "\n")
    model = build(SlotVAEConfig(image_size=16, slots=2, slot_dim=4, encoder=EncoderConfig(width=8, slot_heads=2)))
    found = {
        name: torch.tensor(value) for name, value in (("overlap", overlap), ("slot_0_owns", 1), ("slot_1_owns", 1))
    }
    monkeypatch.setattr(model, "diagnose", lambda *_: found)
    monkeypatch.setattr(training, "_draw", lambda figure, rows, sheets: None)
    page = write(tmp_path, model, torch.zeros(2, 16, 16, 3, dtype=torch.uint8)).read_text()
    assert ("slots are not bound" in page and "What to try" in page) == told
    assert "Changed on the way" in page and "after step 7" in page and "optimiser.lr: 0.1 → 0.2" in page


@pytest.mark.parametrize("with_tokenizer", [True, False])
def test_a_generator_is_drawn_by_samples_of_the_factors_it_is_given(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, with_tokenizer: bool
) -> None:
    rows = [{"step": step, "loss": 2.0, "cross_entropy": 2.0 - own, "jepa": 0.3} for step, own in enumerate((0, 0.5))]
    (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (tmp_path / "config.json").write_text("{}")
    tokenizer = VQVAE(VQVAEConfig(image_size=8, patch=4, width=8, channels=2, codes=5))
    model = generators.build(MaskGITConfig(2, TrunkConfig(8, 1, 2), codes=5), (Factor("size"),)).eval()
    tokens, factors = torch.randint(0, 5, (9, 4)), {"size": torch.rand(9)}
    shade = lambda codes: (50 * codes.byte()).view(-1, 2, 2, 1).expand(-1, -1, -1, 3)  # noqa: E731
    monkeypatch.setattr(tokenizer, "paint", shade)
    told: list[Any] = []
    sample = model.sample
    monkeypatch.setattr(model, "sample", lambda given, **options: told.append(given) or sample(given, **options))
    drawn: list[Any] = []
    monkeypatch.setattr(training, "_draw", lambda figure, rows, sheets: drawn.append(sheets))
    write(tmp_path, model, tokens, factors, tokenizer if with_tokenizer else None)
    if not with_tokenizer:
        assert drawn == [{}] and not told
        return
    assert torch.equal(told[0]["size"], factors["size"][:8])
    images, samples = drawn[0].values()
    assert images.shape == samples.shape == (2, 8 * 2, 3)
    np.testing.assert_array_equal(images, np.concatenate([*shade(tokens[:8]).numpy()], 1))
    assert (images != samples).any()
