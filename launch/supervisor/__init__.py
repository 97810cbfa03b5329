"""The supervisor behind `launch/poise`: rooms of small files (launch/README.md). Python's standard library only."""
