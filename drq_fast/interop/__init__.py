"""drq_fast with other libraries. Nothing here is imported before it is asked for."""
