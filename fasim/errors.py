"""Every way fasim can fail: what happened, why, and what to do next.

The exit code belongs to the kind of failure, so the command line never decides it again.
"""

from __future__ import annotations


class FasimError(Exception):
    """A failure the user can act on.

    ``what`` is one sentence, ``why`` gives the numbers behind it, ``hint`` the next step,
    ``where`` the place it happened (an option, a file and line).
    """

    exit_code = 1

    def __init__(self, what: str, *, why: str = "", hint: str = "", where: str = "") -> None:
        super().__init__(what)
        self.what, self.why, self.hint, self.where = what, why, hint, where

    def __str__(self) -> str:
        parts = [self.what, self.where and f"  --> {self.where}", self.why and f"  {self.why}"]
        text = "\n".join(part for part in parts if part)
        return f"{text}\n\nhint: {self.hint}" if self.hint else text


class CheckFailed(FasimError):
    """The question was answered with no: a mismatch, a stale file, a broken promise."""


class NoPlanError(FasimError):
    """No kernel of this kind can do the problem on this GPU."""


class UsageError(FasimError):
    """The request makes no sense as written."""

    exit_code = 2


class MissingToolError(FasimError):
    """A compiler, a device or a package is not here."""

    exit_code = 3


class CompilerError(FasimError):
    """The compiler refused a generated file."""

    exit_code = 4
