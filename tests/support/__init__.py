"""Things that unit and integration tests share."""
