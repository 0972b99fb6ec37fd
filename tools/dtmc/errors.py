"""What the tuner refuses."""

from __future__ import annotations

from tools.errors import CommandError


class DtmcError(CommandError):
    """Base of the family."""


class ProfileError(DtmcError):
    """A profile is wrong; the message names the field and the remedy."""


class ThresholdError(DtmcError):
    """Thresholds cannot be used: unknown model, above the maximum batch, or a deadlock."""


class TooLarge(DtmcError):
    """The exact chain has more states than the limit, or its states do not fit 63 bits; sample it instead."""


class NotStationary(DtmcError):
    """The exact chain has several closed classes, or so rare moves that its long run is not found."""
