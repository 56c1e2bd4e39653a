"""Who is ready, what fuses, what does not match: pure decisions about requests."""
