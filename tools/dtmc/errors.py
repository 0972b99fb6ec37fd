"""What the tuner refuses, and how it says so.

DtmcError
ProfileError       the profile is wrong: the message names the field and the remedy
ThresholdError     the thresholds cannot be used: unknown model, above the maximum batch, or a deadlock
TooLarge           the exact chain does not fit the stated limit; sample it instead
NotStationary      no stationary distribution of the exact chain was found; the search does without this vector
"""

from __future__ import annotations

from tools.errors import CommandError


class DtmcError(CommandError):
    """Base of everything the command line reports with exit code 2."""


class ProfileError(DtmcError):
    """A profile file is wrong."""


class ThresholdError(DtmcError):
    """A threshold vector is not usable with this profile and number of requests in flight."""


class TooLarge(DtmcError):
    """The exact chain has more states than the limit, or its states do not fit 63 bits."""


class NotStationary(DtmcError):
    """The exact chain has several closed classes, or so rare moves that its long run is not found."""
