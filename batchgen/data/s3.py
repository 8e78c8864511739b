"""S3 as batchgen uses it: s3fs with patience, no listing cache, fresh credentials, and reads that tell the ETag."""

import logging
from typing import Any

import s3fs
from fsspec.asyn import sync_wrapper

log = logging.getLogger(__name__)

_EXPIRED = {"ExpiredToken", "ExpiredTokenException", "RequestExpired", "TokenRefreshRequired"}
_PASSING = {"InternalError", "ServiceUnavailable", "SlowDown", "RequestTimeout", "Throttling", "ThrottlingException"}
_PATIENCE = {"retries": {"mode": "standard", "max_attempts": 6}, "connect_timeout": 10, "read_timeout": 60}
_MOST_TRIES = 8
"""Times that s3fs tries again around the 6 of botocore, which wait longer each time, with jitter: minutes in all."""


class S3FileSystem(s3fs.S3FileSystem):  # type: ignore[misc]
    """s3fs, but: listings are never cached, passing errors are waited out, expired credentials are read again."""

    retries = _MOST_TRIES

    def __init__(self, *args: Any, config_kwargs: dict[str, Any] | None = None, **kwargs: Any) -> None:
        super().__init__(
            *args, **{"use_listings_cache": False, **kwargs}, config_kwargs=_PATIENCE | (config_kwargs or {})
        )

    async def set_session(self, *args: Any, **kwargs: Any) -> Any:
        """Make the client. An endpoint that is no URL is an OSError, as one that is nowhere."""
        try:
            return await super().set_session(*args, **kwargs)
        except ValueError as error:
            raise OSError(f"{error}: write http://host:port or https://host in storage.endpoint") from error

    async def _call_s3(self, method: str, *akwarglist: Any, **kwargs: Any) -> Any:
        try:
            return await super()._call_s3(method, *akwarglist, **kwargs)
        except PermissionError as error:
            if error_code(error) not in _EXPIRED or self.anon:
                raise
        await self.set_session(refresh=True)
        return await super()._call_s3(method, *akwarglist, **kwargs)

    async def _get_with_etag(self, path: str) -> tuple[bytes, str]:
        bucket, key, _ = self.split_path(path)
        answer = await self._call_s3("get_object", Bucket=bucket, Key=key)
        async with answer["Body"] as body:
            return await body.read(), answer["ETag"]

    get_with_etag = sync_wrapper(_get_with_etag)


def error_code(error: BaseException) -> str:
    """The code of S3's answer that led to this error, "" where there was none."""
    answer = getattr(error, "response", None) or getattr(error.__cause__, "response", None) or {}
    code: str = answer.get("Error", {}).get("Code", "")
    return code


def is_lost_race(error: OSError) -> bool:
    """Whether a conditional request was refused since the object is not as expected."""
    return error_code(error) in ("PreconditionFailed", "412", "ConditionalRequestConflict", "409", "NoSuchKey", "404")


def _is_passing(error: BaseException) -> bool:
    answer = getattr(error, "response", None) or {}
    status = answer.get("ResponseMetadata", {}).get("HTTPStatusCode", 0)
    is_passing = (status >= 500 and status != 501) or error_code(error) in _PASSING
    if is_passing:
        log.warning("the store answers %s: waiting, and trying again", error_code(error) or status)
    return is_passing


s3fs.core.set_custom_error_handler(_is_passing)
