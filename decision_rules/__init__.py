"""Estimates -> choice: which schedules an executor supports for a model, the documented ladder, and the reasons."""
