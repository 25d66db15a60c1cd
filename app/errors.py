"""Every way in which the product says no. The message is one plain sentence fit for the person who asked."""

from __future__ import annotations

import math


class AppError(Exception):
    """Base of the product's own errors. `code` is a stable word for programs, `status` the HTTP status."""

    code = "app_error"
    status = 400


class SettingsError(AppError):
    """A setting has a value that Coread cannot use; the message names the variable."""

    code = "invalid_setting"


class DataDirUnusable(SettingsError):
    """The data directory cannot be created or written."""

    code = "data_dir_unusable"


class PortUnavailable(SettingsError):
    """The address to listen on is in use or not allowed."""

    code = "port_unavailable"


class NoIdentity(AppError):
    """The request carries no valid identity cookie and no key."""

    code = "no_identity"
    status = 401


class SignedOut(NoIdentity):
    """Whoever the page was opened by is no longer signed in; its script knows this by the code."""

    code = "signed_out"


class NotAllowed(AppError):
    """The principal may not do this."""

    code = "not_allowed"
    status = 403


class NotFoundHere(AppError):
    """There is no such thing, or this principal may not read it (the two are told apart by nobody)."""

    code = "not_found"
    status = 404


class QuestionRefused(AppError):
    """The question is empty or longer than the limit."""

    code = "invalid_question"
    status = 422


class CommentRefused(AppError):
    """A comment on an answer is longer than the limit, or no rating came with it."""

    code = "comment_refused"


class TitleRefused(AppError):
    """A conversation cannot be called that."""

    code = "title_refused"


class UploadRefused(AppError):
    """A file was not taken: too large, empty, or over the person's quota."""

    code = "upload_refused"
    status = 413


class BodyTooLarge(AppError):
    """A request brings more bytes than its route takes."""

    code = "body_too_large"
    status = 413


class ValueRefused(AppError):
    """A name, a password or another value is empty, too long or not of the kind that is needed."""

    code = "invalid_value"
    status = 422


class QuotaRefused(AppError):
    """A person keeps as many of something as the server allows."""

    code = "quota_exceeded"
    status = 409


class TooMany(AppError):
    """A limit is used up for now; `retry_after_s` says for how long, and so does the message."""

    code = "rate_limit_exceeded"
    status = 429

    def __init__(self, message: str, retry_after_s: float) -> None:
        #: Whole seconds and at least one: earlier would only be refused again.
        self.retry_after_s = float(max(1, math.ceil(retry_after_s)))
        super().__init__(f"{message} Try again in {_duration(self.retry_after_s)}.")


def _duration(seconds: float) -> str:
    whole = int(seconds)
    if whole >= 120:
        return f"{math.ceil(whole / 60):,} minutes"
    return f"{whole} second" if whole == 1 else f"{whole} seconds"


class TurnRunning(AppError):
    """The conversation is still being answered; one turn runs at a time."""

    code = "turn_running"
    status = 409


class StillWarmingUp(AppError):
    """The models are still being loaded."""

    code = "warming_up"
    status = 503


class LoadingFailed(AppError):
    """Loading ended with an error: waiting changes nothing, somebody has to mend it and start anew."""

    code = "loading_failed"
    status = 503


class ShuttingDown(AppError):
    """The server is being stopped; what was asked for is no longer done."""

    code = "shutting_down"
    status = 503


class ServerUnreachable(AppError):
    """A command found a server's lock on the data directory but no answer at its door."""

    code = "server_unreachable"
    status = 503
