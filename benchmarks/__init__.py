"""Ours beside the peers and beside the limit, in one run; one file per technique."""
