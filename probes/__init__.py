"""Workload -> profile: the catalogue, the traced probe (no GPU) and the measured probe (one block at a time on a GPU)."""
