"""One file for each command of `poise`."""
