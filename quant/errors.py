"""The few typed errors of the project: each one is a broken invariant.

Every error carries one sentence that names the offending thing and the way out. Commands print that sentence and exit with
``exit_code``; nothing else is caught at the edge. This module imports nothing, so that it is free to raise before heavy work.
"""


class BitledgerError(Exception):
    """Base of all errors that a user can mend: one sentence, exit code 2."""

    exit_code = 2


class UsageError(BitledgerError):
    """An option, name or combination of options that makes no sense."""


class SchemeError(BitledgerError):
    """A scheme that does not exist, or that cannot hold the given matrix."""


class RecipeError(BitledgerError):
    """An unknown key, a pattern that matches nothing, or a tensor that no rule matches."""


class SourceError(BitledgerError):
    """A checkpoint that is missing, misnamed, of a refused kind or inconsistent with itself."""


class TruncatedFile(SourceError):
    """A file that is shorter or longer than its own header promises."""


class NonFiniteTensor(SourceError):
    """A NaN or an infinity in a tensor, named with its index."""


class HubUnreachable(SourceError):
    """The model or data hub did not answer in time."""


class CorpusError(BitledgerError):
    """A corpus that is missing, empty, unreadable or too short."""


class WindowsOverlap(BitledgerError):
    """Calibration and evaluation windows that share tokens."""


class OutputError(BitledgerError):
    """An output folder that cannot or must not be written."""


class CoverageError(BitledgerError):
    """A source tensor without a fate or with two, or a ledger that does not sum to the file."""


class VerifyError(BitledgerError):
    """A stored artefact that does not match its manifest."""

    exit_code = 1


class GateFailed(BitledgerError):
    """An artefact that a policy does not let pass."""

    exit_code = 1
