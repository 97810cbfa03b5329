"""Reads a run's record and makes figures, tables, pictures and timelines of it; makes the requests of `poise bench`."""
