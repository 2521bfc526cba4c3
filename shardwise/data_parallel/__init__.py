"""Data parallelism: flat buckets, and their gradients summed while backward still runs."""
