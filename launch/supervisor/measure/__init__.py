"""Figures: what a run left on record, as tables, pictures and timelines; and the requests of `poise bench`."""
