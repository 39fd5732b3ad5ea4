"""The error vocabulary. A failed rollout is data (it is recorded, see `types.RolloutStatus`); a failed component is one of these.

Each subclass also inherits the standard type a Python programmer would catch. Messages say what happened, where, and what to do.
"""


class SlipstreamError(Exception):
    """Base of every error that slipstream raises on purpose."""


class ConfigError(SlipstreamError, ValueError):
    """Wrong settings. `problems` holds one line each: file, key, what was given, what is allowed."""

    def __init__(self, problems: list[str] | str):
        self.problems = [problems] if isinstance(problems, str) else list(problems)
        count = len(self.problems)
        head = "" if count == 1 else f"{count} problems in the settings:\n"
        super().__init__(head + "\n".join(self.problems if count == 1 else [f"  - {p}" for p in self.problems]))


class DataError(SlipstreamError, ValueError):
    """A data set that cannot be used as the settings ask."""


class ModelError(SlipstreamError, ValueError):
    """A model that cannot be loaded, or that fails the probe against plain forwards."""


class MemoryNeedError(SlipstreamError, MemoryError):
    """The run needs more memory than there is; said before anything is loaded."""


class RunFolderError(SlipstreamError, OSError):
    """The run folder is in use, read-only, full, or on a file system the ledger cannot live on."""


class LedgerError(SlipstreamError, RuntimeError):
    """The ledger refuses an event, or its file is damaged."""


class CheckpointError(SlipstreamError, RuntimeError):
    """A checkpoint that is damaged, incomplete or not reached by the ledger."""


class ResumeError(SlipstreamError, ValueError):
    """What was asked for does not fit the run in the folder; both values are shown."""


class StalenessError(SlipstreamError, AssertionError):
    """A token older than the derived bound reached the trainer: an invariant is broken."""


class WeightSyncError(SlipstreamError, RuntimeError):
    """Weights that do not match their manifest, or a report that does not match what was published."""


class ScoringError(SlipstreamError, RuntimeError):
    """A scorer failed on a group (raised, hung, returned what is not a reward). The group is recorded as failed."""


class ScoringDeadline(ScoringError):
    """A scorer did not answer within its deadline. In a deterministic run it ends the run: what a clock decides cannot be repeated."""


class EnvironmentFailed(SlipstreamError, RuntimeError):
    """An environment failed in one rollout. The rollout is recorded as failed."""


class EngineRefused(SlipstreamError, RuntimeError):
    """A server did not answer one request, whatever was tried. The rollout is recorded as failed."""


class RunFailed(SlipstreamError, RuntimeError):
    """The run cannot make progress: every recent group failed or was filtered, or an update was skipped too often."""


class RoleFailed(SlipstreamError, RuntimeError):
    """A role ended with an error of its own. `role` names it."""

    def __init__(self, role: str, message: str):
        self.role = role
        super().__init__(message)


class RoleHung(SlipstreamError, TimeoutError):
    """A role owed work and made no progress within its phase's deadline."""


class DeadlineExceeded(SlipstreamError, TimeoutError):
    """A wait ran past its deadline; the message names what was waited for."""


class PeerLost(SlipstreamError, ConnectionError):
    """The other end of a connection went away. Usually a symptom: the peer's own error is the cause."""
