"""The errors a user can act on.

AdaptError               exit 1   something failed; the message says what, the hint what to do
├── UsageError           exit 2   the command line asks for something that does not exist
├── FormatError          exit 1   a file is damaged, incomplete, or not what its name says
├── UnsupportedError     exit 1   a sound input that this program does not handle
├── AccessError          exit 4   gated, unauthorised, missing on the Hub, or offline and not cached
└── ResourceError        exit 5   not enough memory or disk

Every layer may raise these; only `cli` prints them. This module imports nothing of the package.
"""

from collections.abc import Callable
from typing import TypeVar

A = TypeVar("A")
R = TypeVar("R")


class AdaptError(Exception):
    """A known failure: `message` says what is wrong, `hint` what the user can do about it."""

    exit_code = 1

    def __init__(self, message: str, hint: str = "") -> None:
        super().__init__(message)
        self.message = message
        self.hint = hint

    def __str__(self) -> str:
        return f"{self.message}. {self.hint}" if self.hint else self.message


class UsageError(AdaptError):
    """The request itself is wrong."""

    exit_code = 2


class FormatError(AdaptError):
    """A file is damaged, incomplete, or not what its name says."""


class UnsupportedError(AdaptError):
    """A sound input that this program does not handle."""


class AccessError(AdaptError):
    """Gated, unauthorised, missing on the Hub, or offline and not cached."""

    exit_code = 4


class ResourceError(AdaptError):
    """Not enough memory or disk."""

    exit_code = 5


def attempt(function: Callable[[A], R], argument: A) -> R | AdaptError:
    """Call a function with one of many arguments; return its result, or the error that is this argument's alone.

    Raises AccessError and ResourceError, which the next argument would meet too.
    """
    try:
        return function(argument)
    except (ResourceError, AccessError):
        raise
    except AdaptError as error:
        return error
