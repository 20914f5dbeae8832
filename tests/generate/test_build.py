"""Settings that cannot work are refused with what was expected."""

from dataclasses import replace
from typing import Any

import pytest

from compgen_fast.generate.build import build, check
from compgen_fast.generate.config import ConditioningConfig, JepaConfig, TrunkConfig
from tests.generate.cases import FACTORS, KINDS


@pytest.mark.parametrize(
    ("kind", "changes", "sentence"),
    [
        ("dit", {"channels": 0}, "channels is 0; expected at least 1"),
        ("maskgit", {"codes": 1}, "codes is 1; expected at least 2"),
        ("maskgit", {"label_smoothing": 1.0}, "label_smoothing is 1.0; expected 0 to below 1"),
        ("mar", {"head_layers": 0}, "head_layers is 0; expected at least 1"),
        ("masked givt", {"components": 0}, "components is 0; expected at least 1"),
        ("dit", {"conditioning": ConditioningConfig(bins=1)}, "bins is 1; expected at least 2"),
        ("dit", {"conditioning": ConditioningConfig(all_dropout=-0.1)}, "all_dropout is -0.1; expected 0 to below 1"),
        ("dit", {"jepa": JepaConfig(rate=1.1)}, "rate is 1.1; expected 0 to 1"),
        ("dit", {"jepa": JepaConfig(rate_steps=0)}, "rate_steps is 0; expected at least 1"),
    ],
)
def test_settings_that_cannot_work_are_refused(kind: str, changes: dict[str, Any], sentence: str) -> None:
    with pytest.raises(ValueError, match=sentence):
        check(replace(KINDS[kind], **changes))


@pytest.mark.parametrize("changes", [{"side": 0}, {"trunk": TrunkConfig(layers=0)}])
def test_a_trunk_needs_tokens_and_layers(changes: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match="expected at least 1 of each"):
        build(replace(KINDS["dit"], **changes), FACTORS)
