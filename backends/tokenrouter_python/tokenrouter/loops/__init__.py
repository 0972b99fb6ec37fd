"""The two loops that drive the state machines with a carrier and a clock. One thread owns each.

Neither polls: a loop sleeps until a frame, a `wake`, or a deadline of its state machine.

`orchestrating` drives the entry model's machine, `decoding` one model's; `sleeping` is what both share.
"""
