"""Pages about finished work: what was run, curves, pictures. They read a folder and write into it, no more."""
