"""Memory: which numbers are kept in which precision."""
