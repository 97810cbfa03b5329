"""The supervisor behind `launch/poise`: one small file per thing. Python's standard library only."""
