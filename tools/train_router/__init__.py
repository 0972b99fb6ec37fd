"""Trains the routers of R2R, CITER, Co-LLM and query-level routing for any pair of models with one tokenizer.

``python -m tools.train_router collect`` runs both models and writes labelled features; ``r2r``, ``citer``, ``collm``
and ``query`` train on them; ``threshold`` chooses a threshold and writes it into the router's file; ``demo`` does all
of it for the demo pair. See docs/policies.md.
"""
