"""Soak: minutes of load, watched for errors, hangs and growing memory."""
