"""Inverting decoders: which latents explain an image. Start with docs/search.md."""

from compgen_fast.invert.composites import Composites
from compgen_fast.invert.marginals import SlotMarginals
from compgen_fast.invert.newton import newton
from compgen_fast.invert.search import Found, search
from compgen_fast.invert.starts import starts

__all__ = ["Composites", "Found", "SlotMarginals", "newton", "search", "starts"]
