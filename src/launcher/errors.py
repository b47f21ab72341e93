"""What ends a launch, under the names that TGI's log scrapers match.

LauncherError
├── ArgumentValidation       the options contradict each other, the machine or the model
├── NotEnoughCUDADevices     `--sharded true`, but there are fewer than two devices
├── DownloadError            the download step failed
├── ShardCannotStart         a shard exited before all were ready
├── ShardFailed              a shard exited while serving
├── WebserverCannotStart     the router could not be started, or was not ready in time
├── WebserverFailed          the router ended
├── NodeFailed               a launcher that Ray placed ended by itself
└── NodeLost                 another node of the group failed or is not heard from
"""

from __future__ import annotations

from wire.exit_status import LOST_NODE
from wire.text.escape import as_error, quoted


class LauncherError(Exception):
    """Ends the launch; the text is one sentence for the operator."""

    exit_status = 1
    comes_from_a_child = False
    """The log has more of it."""
    is_consequence = False
    """What failed did so because something else had: another shard, mostly."""

    def report(self) -> str:
        """The last line on standard error, in TGI's form."""
        return f"Error: {type(self).__name__}({quoted(str(self))})" if str(self) else f"Error: {type(self).__name__}"

    def for_terminal(self, *, is_short: bool) -> str:
        """The one line that a person gets. `is_short`: the log has not been shown."""
        return as_error(str(self)) + ("; --verbose shows more" if is_short and self.comes_from_a_child else "")


class ArgumentValidation(LauncherError):
    pass


class NotEnoughCUDADevices(LauncherError):
    pass


class DownloadError(LauncherError):
    pass


class ShardCannotStart(LauncherError):
    comes_from_a_child = True


class ShardFailed(LauncherError):
    comes_from_a_child = True


class WebserverCannotStart(LauncherError):
    comes_from_a_child = True


class WebserverFailed(LauncherError):
    comes_from_a_child = True


class NodeFailed(LauncherError):
    pass


class NodeLost(LauncherError):
    exit_status = LOST_NODE
