"""The page a researcher follows runs as it stands."""

import re
from pathlib import Path

import pytest
import torch

from compgen_fast.jets.jet import RULES

PAGE = Path(__file__).parents[2] / "docs/jets.md"


def test_every_example_on_the_page_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    for function in (torch.sinc, torch.Tensor.sinc):  # the page registers a rule for them
        monkeypatch.setitem(RULES, function, None)
    examples = re.findall(r"```python\n(.*?)```", PAGE.read_text(), re.DOTALL)
    assert len(examples) == 4
    namespace: dict[str, object] = {}
    for example in examples:
        exec(example, namespace)
    assert (tmp_path / "norms.png").exists()
