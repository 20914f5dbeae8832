"""What decides whether a generator composes? Objectives on one trunk, what they are told, JEPA, and circuits.

    plan.py      the jobs of a scale: tokenizers, generators
    prepare.py   what generators stand on: trained tokenizers, probes of generated images
    runs.py      a generator: trained, and asked for all compositions along the way
    circuits.py  which heads and neurons a generator needs for which factor
    claims.py    what was claimed, and whether it holds
    study.py     the whole: jobs (by studies/queue.py), results.json, tables, page

Read docs/generation.md first.
"""
