"""What ends a launch, under the names that TGI's log scrapers match.

LauncherError
├── ArgumentValidation       the options contradict each other, the machine or the model
├── NotEnoughCUDADevices     sharding was demanded, one device or none is there
├── DownloadError            the download step failed
├── ShardCannotStart         a shard ended before all were ready
├── ShardFailed              a shard ended while serving
├── WebserverCannotStart     the router cannot be executed, or did not answer in time
└── WebserverFailed          the router ended
"""

from __future__ import annotations

from wire.text.escape import quoted


class LauncherError(Exception):
    """Ends the launch with exit status 1; the text is one sentence for the operator."""

    def report(self) -> str:
        """The last line on standard error, in TGI's form."""
        return f"Error: {type(self).__name__}({quoted(str(self))})" if str(self) else f"Error: {type(self).__name__}"


class ArgumentValidation(LauncherError):
    pass


class NotEnoughCUDADevices(LauncherError):
    pass


class DownloadError(LauncherError):
    pass


class ShardCannotStart(LauncherError):
    pass


class ShardFailed(LauncherError):
    pass


class WebserverCannotStart(LauncherError):
    pass


class WebserverFailed(LauncherError):
    pass
