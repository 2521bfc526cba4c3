"""Tensor parallelism: the work inside a layer divided over the `tensor` axis (Megatron-LM, arXiv 1909.08053), and the
sequence between (arXiv 2205.05198)."""
