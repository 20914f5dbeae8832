"""Do models perceive combinations they never saw? Decoders inverted by search and replay, against encoders alone.

    plan.py      what is trained at which scale: a list of jobs
    queue.py     runs the jobs, as many at a time as there are cores, with progress; goes on where it was cut off
    work.py      one job: train, replay
    measuring.py one job: infer latents, read them, measure the decoder
    pictures.py  what the page shows of a search
    claims.py    what was claimed beforehand, and whether it holds
    study.py     the whole: jobs, results.json, tables, page

Read docs/perception.md first.
"""
