"""A registry in S3, through boto3. Every request has a time-out and a bounded number of tries with growing waits (botocore's
standard mode); a conditional write whose answer was lost is looked up, for its bytes are of one try alone.

Credentials, and what params.yaml leaves open, come from the environment as for every tool of AWS: AWS_ACCESS_KEY_ID and
AWS_SECRET_ACCESS_KEY, AWS_PROFILE, a role; AWS_ENDPOINT_URL, AWS_REGION.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from flows.registry import s3_upload
from flows.registry.s3_faults import GARBLED, GONE, REFUSED, code_of, in_words
from flows.registry.store import Found, Garbled, Listed, StoreError
from stages.contracts.params import Registry

_PIECE = 1 << 20


class S3Store:
    """Objects below a prefix of one bucket."""

    def __init__(self, client: Any, bucket: str, prefix: str, tries: int) -> None:
        self._client, self._bucket, self._prefix, self._tries = client, bucket, prefix, tries

    @classmethod
    def connect(cls, settings: Registry) -> S3Store:
        """The store of params.yaml's registry section; no request is made yet.

        Raises:
            StoreError: the environment holds no usable settings (an unknown profile, a malformed file of AWS).
        """
        import boto3
        from botocore.config import Config
        from botocore.exceptions import BotoCoreError

        bucket, _, prefix = settings.uri.removeprefix("s3://").partition("/")
        config = Config(
            retries={"mode": "standard", "total_max_attempts": settings.retries + 1},
            connect_timeout=min(settings.timeout_s, 10.0),
            read_timeout=settings.timeout_s,
            s3={"addressing_style": "path"} if settings.endpoint_url else {},
        )
        try:
            session = boto3.Session()  # boto3's own default one keeps the first credentials that it saw
            region = settings.region or session.region_name or "us-east-1"  # stores that are not Amazon's ignore it
            client = session.client("s3", endpoint_url=settings.endpoint_url, region_name=region, config=config)
        except (BotoCoreError, ValueError) as error:
            raise in_words(error, "connect", settings.uri) from error
        return cls(client, bucket, prefix.strip("/"), settings.retries + 1)

    @property
    def where(self) -> str:
        return f"s3://{self._bucket}/{self._prefix}".rstrip("/")

    def _key(self, key: str) -> str:
        return f"{self._prefix}/{key}" if self._prefix else key

    def _ask(self, operation: str, key: str, **more: Any) -> Any:
        """One request with its tries; None where the object is not there.

        Raises:
            StoreError: in words.
        """
        from botocore.exceptions import BotoCoreError, ClientError

        method: Callable[..., Any] = getattr(self._client, operation)
        try:
            return method(Bucket=self._bucket, Key=self._key(key), **more)
        except (BotoCoreError, ClientError) as error:
            if code_of(error) in GONE:
                return None
            raise in_words(error, operation, f"{self.where}/{key}") from error

    def read(self, key: str) -> Found | None:
        for last in [*[False] * (self._tries - 1), True]:
            told = self._ask("get_object", key)
            if told is None:
                return None
            try:
                return Found(b"".join(self._pieces(key, told)), told["ETag"])
            except Garbled:
                if last:
                    raise
        raise AssertionError("the last try returns or raises")

    def _pieces(self, key: str, told: Any) -> Iterator[bytes]:
        """The body of an answer; one that breaks off goes on behind what came, of the same version.

        Raises:
            Garbled: it came whole and is not what the store's checksum says.
            StoreError: it broke off at every try.
        """
        from botocore.exceptions import BotoCoreError, ClientError

        size, version, at = int(told["ContentLength"]), told["ETag"], 0
        where = f"{self.where}/{key}"
        for last in [*[False] * (self._tries - 1), True]:
            try:
                while piece := told["Body"].read(_PIECE):
                    at += len(piece)
                    yield piece
                if at >= size:
                    return
                broken: Exception = OSError(f"{size - at} of {size} bytes did not come")
            except (BotoCoreError, ClientError, OSError) as error:
                broken = error
            if at >= size:
                raise Garbled(
                    "An object came in other bytes than S3 has", where=where, got=str(broken)[:300]
                ) from broken
            told = None if last else self._ask("get_object", key, Range=f"bytes={at}-", IfMatch=version)
            if told is None:
                raise in_words(broken, "get_object", where) from broken

    def stream(self, key: str) -> Iterator[bytes]:
        told = self._ask("get_object", key)
        if told is None:
            raise StoreError(
                "The registry has no such object",
                where=f"{self.where}/{key}",
                do="restore it from a version or a backup of the bucket, or promote the draft again",
            )
        yield from self._pieces(key, told)

    def create(self, key: str, data: bytes) -> bool:
        return self._write(key, data, IfNoneMatch="*")

    def replace(self, key: str, data: bytes, version: str) -> bool:
        return self._write(key, data, IfMatch=version)

    def _write(self, key: str, data: bytes, **condition: str) -> bool:
        """A conditional write. A lost answer makes a later try fail against our own bytes, so what is there decides."""
        from botocore.exceptions import BotoCoreError, ClientError

        for last in [*[False] * (self._tries - 1), True]:
            try:
                self._client.put_object(Bucket=self._bucket, Key=self._key(key), Body=data, **condition)
                return True
            except (BotoCoreError, ClientError) as error:
                code = code_of(error)
                there = self.read(key)
                if there is not None and there.data == data:
                    return True
                if code in REFUSED or (code in GONE and "IfMatch" in condition):
                    return False
                if code not in GARBLED or last:
                    raise in_words(error, "put_object", f"{self.where}/{key}") from error
        raise AssertionError("the last try returns or raises")

    def look(self, key: str) -> Listed | None:
        told = self._ask("head_object", key)
        return None if told is None else Listed(key, told["ContentLength"], told["LastModified"].timestamp())

    def listing(self, prefix: str) -> list[Listed]:
        from botocore.exceptions import BotoCoreError, ClientError

        cut = len(self._key(""))
        found: list[Listed] = []
        try:
            pages = self._client.get_paginator("list_objects_v2")
            for page in pages.paginate(Bucket=self._bucket, Prefix=self._key(prefix)):
                for row in page.get("Contents", []):
                    found.append(Listed(row["Key"][cut:], row["Size"], row["LastModified"].timestamp()))
        except (BotoCoreError, ClientError) as error:
            raise in_words(error, "list_objects_v2", f"{self.where}/{prefix}") from error
        return sorted(found, key=lambda one: one.key)

    def put_file(self, key: str, path: Path) -> None:
        from botocore.exceptions import BotoCoreError, ClientError

        try:
            s3_upload.put_file(self._client, self._bucket, self._key(key), path, self._tries)
        except (BotoCoreError, ClientError) as error:
            raise in_words(error, "put_object", f"{self.where}/{key}") from error

    def delete(self, key: str) -> None:
        self._ask("delete_object", key)

    def sweep(self, older_than_s: float) -> list[str]:
        from botocore.exceptions import BotoCoreError, ClientError

        try:
            return s3_upload.abort_unfinished(self._client, self._bucket, self._key("blobs/"), older_than_s)
        except (BotoCoreError, ClientError) as error:
            raise in_words(error, "list_multipart_uploads", f"{self.where}/blobs/") from error
