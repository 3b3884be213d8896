# SPDX-License-Identifier: Apache-2.0
"""The errors a user of this package meets.

Every message is one line that names the thing, what was found and what was expected.
"""


class PerceptionError(Exception):
    """Base of all errors that this package raises on purpose."""


class ConfigError(PerceptionError, ValueError):
    """A parameter has a wrong name, type or value; the message begins with its name."""


class ArtifactError(PerceptionError):
    """A model file is missing, damaged, of another model, or cannot be fetched."""


class InputError(PerceptionError, ValueError):
    """One frame or one input file is refused; nothing that the model keeps has changed.

    :param reason: one short word for counters, for example ``layout`` or ``empty``.
    """

    def __init__(self, message: str, reason: str = 'input'):
        super().__init__(message)
        self.reason = reason


class CapacityError(InputError):
    """A frame has more active sites on one level of the network than its buffers hold."""

    def __init__(self, message: str):
        super().__init__(message, reason='capacity')


class DeviceError(PerceptionError, RuntimeError):
    """The accelerator cannot be opened, was lost, or did not answer in time."""
