"""What a run is made of, from its first check to the end of its last process."""
