"""The main job: trainer, checkpoints, metrics, launching, faults."""
