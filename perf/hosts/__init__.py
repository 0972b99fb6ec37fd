"""What it costs that a model is on another host: the carriers side by side, in one server and in one run."""
