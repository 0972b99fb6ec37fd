"""What a server did, step by step and request by request, and how it is shown.

`steps` and `trail` keep it (pure, bounded), `recording` is what one model tells of it, `chrome` makes Chrome's trace
format of what all models told, `client` asks a server.
"""
