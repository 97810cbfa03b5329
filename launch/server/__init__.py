"""The front of `poise serve`: HTTP on one side, the planner's socket on the other. A process of its own, in an environment of its own."""
