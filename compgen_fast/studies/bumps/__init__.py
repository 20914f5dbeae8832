"""Are disentangled inputs enough to compose? Decoders of (x, y) codes, asked for bumps at positions they never saw.

    sheet.py     the data: codes and images of all positions and of stripes
    decoders.py  what is trained: stacks of MLPs, CNNs and rendering CNNs
    fitting.py   how: many models at once
    failure.py   naive decoders, what few shots mend, and the geometry of their layers
    plan_a.py    tokens that render themselves; the interaction penalty with its controls
    plan_b.py    how many bumps it takes, alone and with stripes
    plan.py      the jobs of a scale
    claims.py    what was claimed, and whether it holds
    study.py     the whole: jobs (by studies/queue.py), results.json, tables, page

Read docs/bumps.md first.
"""
