"""Command-line tools around the server: launcher, builder, evaluation, scheduling."""
