"""Generators: factors in, latents out, by different objectives on one transformer.

`compgen_fast.generate.build` makes them from settings; `compgen_fast.generate.tokenizers` turns images into latents and
back.
"""
