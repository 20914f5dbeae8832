"""Discs that PIL drew are found where PIL drew them."""

import re

import pytest

from tests.examples.scripts import printed_by


def test_both_discs_are_found() -> None:
    error, *discs = printed_by("invert_an_image.py").splitlines()
    before, after = map(float, re.findall(r"0\.\d+", error))
    assert after < before / 10
    (radius, x, y), (other_radius, other_x, other_y) = sorted(
        [[float(number) for number in re.findall(r"\d+\.\d", disc)] for disc in discs], key=lambda disc: disc[1]
    )
    assert (x, y, radius) == pytest.approx((9.5, 10.5, 5.5), abs=1.0)
    assert (other_x, other_y, other_radius) == pytest.approx((23.5, 20.5, 6.5), abs=1.0)
