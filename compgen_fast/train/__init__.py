"""Training: DeepSpeed's engine, checkpoints, guards, metrics. Start reading at loop.py."""
