"""Peak memory is counted, not sampled: known allocations give known bytes."""

import torch
from torch import Tensor

from compgen_fast.bench.memory import Peaks, measure_peaks, peaks_of

KB = 1024


def kilobytes(count: int) -> Tensor:
    return torch.empty(count * KB, dtype=torch.uint8)


def nothing(kept: object) -> None:
    return None


def test_a_temporary_counts_while_it_lives() -> None:
    def forward() -> Tensor:
        temporary = kilobytes(300)
        del temporary
        return kilobytes(200)

    assert measure_peaks(forward, nothing, "cpu") == Peaks(300 * KB, 0, 300 * KB)


def test_backward_is_measured_from_what_the_forward_left() -> None:
    def backward(kept: list[Tensor]) -> Tensor:
        gradient = kilobytes(50)
        kept.clear()
        return torch.cat([gradient, kilobytes(10)])

    peaks = measure_peaks(lambda: [kilobytes(100)], backward, "cpu")
    # 50; the 100 of the forward go; 10 more; then 60 for the result, all three alive: 120 − 100 is below the first 50.
    assert peaks == Peaks(100 * KB, 50 * KB, 150 * KB)


def test_memory_alive_before_does_not_count() -> None:
    before = kilobytes(1000)
    assert measure_peaks(lambda: before.view(-1), nothing, "cpu").full == 0


def test_our_ops_are_seen_from_inside() -> None:
    from compgen_fast.ops import slot_cross_attention

    q, k = torch.randn(2, 64, 3, 8), torch.randn(2, 5, 3, 8)
    peaks = measure_peaks(lambda: slot_cross_attention(q, k, k), nothing, "cpu")
    out_and_weights = 4 * (2 * 64 * 3 * 8 + 2 * 64 * 5)
    assert peaks.forward >= out_and_weights


def test_peaks_of_events() -> None:
    assert peaks_of([], []) == Peaks(0, 0, 0)
    assert peaks_of([10, -10, 4], [3, 3, -1]) == Peaks(10, 6, 10)
    assert peaks_of([10], [5, -20, 7]) == Peaks(10, 5, 15)
