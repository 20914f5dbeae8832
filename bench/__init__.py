"""Benchmarks: our kernels against the peers a user would pick, checked first, then timed side by side in one run."""
