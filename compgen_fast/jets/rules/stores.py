"""Writing into a jet: allowed where nothing else can see the old value, refused in words where something might."""

from compgen_fast.jets.jet import Jet


def stored(x: object, result: Jet, inplace: bool = True) -> Jet:
    """``result``, written into ``x`` when ``inplace``: whoever holds x sees it, as torch's in-place ops promise."""
    if not inplace:
        return result
    if not isinstance(x, Jet):
        raise NotImplementedError(
            "jets: a plain tensor cannot take a jet in place; make a new one (torch.stack, torch.cat, a + b)"
        )
    if x.aliased:
        raise NotImplementedError(
            "jets: in-place on a jet that shares memory with a view of it; do it out of place (x = x + y, not x += y)"
        )
    if result.shape != x.shape or result.dtype != x.dtype:
        raise RuntimeError(f"jets: in-place result {result!r} does not fit {x!r}")
    x.channels, x.side = result.channels, result.side
    return x
