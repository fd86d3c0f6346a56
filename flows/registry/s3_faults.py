"""What S3 answers, in words: what is wrong, where, and what to do. No credential is in them."""

from __future__ import annotations

from flows.registry.store import StoreError

GONE = {"NoSuchKey", "404", "NotFound"}
REFUSED = {"PreconditionFailed", "412", "ConditionalRequestConflict", "409"}
# What was sent is not what came there: sent again it may be.
GARBLED = {
    "BadDigest",
    "InvalidDigest",
    "XAmzContentSHA256Mismatch",
    "XAmzContentChecksumMismatch",
    "InvalidPart",
    "MalformedXML",
    "IncompleteBody",
}
_KEYS = "set AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY (or AWS_PROFILE) in this process's environment"
_BY_CODE = {
    "NoSuchBucket": ("The bucket is not there", "create it, or mend registry.uri in params.yaml"),
    "InvalidAccessKeyId": ("S3 does not know this access key", _KEYS),
    "SignatureDoesNotMatch": ("S3 refuses this secret key", _KEYS),
    "InvalidToken": ("S3 refuses this session token", _KEYS),
    "ExpiredToken": ("The session token has expired", _KEYS),
    "AccessDenied": (
        "S3 does not allow this",
        "give this key the rights to list, read, write and delete below registry.uri",
    ),
    "403": ("S3 does not allow this", f"{_KEYS}; the key needs rights to list, read, write and delete there"),
    "NotImplemented": (
        "This S3 cannot do what a registry needs",
        "use one with conditional writes and multipart uploads",
    ),
    "RequestTimeTooSkewed": ("The clocks of this machine and of S3 differ too much", "set this machine's clock"),
    "PermanentRedirect": ("The bucket is in another region", "set registry.region in params.yaml"),
    "AuthorizationHeaderMalformed": ("The bucket is in another region", "set registry.region in params.yaml"),
    "QuotaExceeded": ("S3 has no room left for this", "`python -m flows.release prune` tells what could go"),
    "InsufficientStorage": ("S3 has no room left for this", "`python -m flows.release prune` tells what could go"),
    "507": ("S3 has no room left for this", "`python -m flows.release prune` tells what could go"),
}
_BY_KIND = {
    "NoCredentialsError": ("No credentials for S3 in the environment", _KEYS),
    "PartialCredentialsError": ("Half of the credentials for S3 are missing", _KEYS),
    "ProfileNotFound": ("AWS_PROFILE names no profile", _KEYS),
    "EndpointConnectionError": (
        "S3 is not reached",
        "check registry.endpoint_url (or AWS_ENDPOINT_URL) and the network",
    ),
    "ConnectTimeoutError": (
        "S3 is not reached in time",
        "check registry.endpoint_url (or AWS_ENDPOINT_URL) and the network",
    ),
}
_IN_PASSING = (
    "S3 failed at this, every try",
    "look at the S3 server's log and room (`df -h` there); then do this again: finished uploads are kept",
)


def code_of(error: BaseException) -> str:
    """S3's own word for what it refused, its HTTP status where it has none, or nothing."""
    response = getattr(error, "response", None) or {}
    return str(
        response.get("Error", {}).get("Code", "") or response.get("ResponseMetadata", {}).get("HTTPStatusCode", "")
    )


def in_words(error: BaseException, operation: str, where: str) -> StoreError:
    """A failed request as a StoreError: by S3's code, then by the kind of failure."""
    code, kind = code_of(error), type(error).__name__
    what, do = _BY_CODE.get(code) or _BY_KIND.get(kind) or _IN_PASSING
    got = f"{operation}: {code or kind}: {str(error)[:300]}"
    return StoreError(what, where=where, got=got, do=do)
