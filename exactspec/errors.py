"""Errors with a meaning for the user. Every message names the field, tensor or file at fault."""


class ExactSpecError(Exception):
    """Base of all errors that ExactSpec raises on purpose."""


class RequestError(ExactSpecError, ValueError):
    """A request that cannot be served exactly as asked (contract C6).

    `field` is the name of the offending parameter; HTTP turns this error into a 400.
    """

    def __init__(self, field: str, reason: str) -> None:
        super().__init__(f"{field}: {reason}")
        self.field = field
        self.reason = reason


class QueueFullError(ExactSpecError):
    """The waiting queue is at its limit; try again later (HTTP 503)."""


class ConfigError(ExactSpecError, ValueError):
    """Engine, draft or server settings that do not fit together."""


class CheckpointError(ExactSpecError, ValueError):
    """A checkpoint that is incomplete, damaged or does not fit; says which tensor and what was expected."""


class UnsupportedModelError(CheckpointError):
    """An architecture that no native implementation covers; the message lists those that are."""


class DeviceError(ExactSpecError, RuntimeError):
    """A device or kernel that is asked for and not available. There is no silent fall-back."""
