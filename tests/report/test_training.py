import json
from pathlib import Path

import torch

from compgen_fast.models.build import build
from compgen_fast.models.config import DecoderConfig, EncoderConfig, SlotVAEConfig
from compgen_fast.report.page import PAGE, PICTURE
from compgen_fast.report.training import write


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
    assert "0.666667" in page.read_text() and "&lt;7&gt;" in page.read_text()
    assert (tmp_path / PICTURE).read_bytes().startswith(b"\x89PNG")
