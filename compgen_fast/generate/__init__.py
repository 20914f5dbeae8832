"""Generators: factors in, latents out, by different objectives on one transformer.

`compgen_fast.generate.build` makes them from settings; `compgen_fast.models.tokenizer` turns images into latents and
back, and `compgen_fast.generate.latents` keeps them as shards.
"""
