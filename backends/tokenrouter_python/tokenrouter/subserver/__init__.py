"""One model: its visits, and what runs them."""
