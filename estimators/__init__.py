"""Profile + schedule + device -> estimate: memory timeline, allocator, step time, bands."""
