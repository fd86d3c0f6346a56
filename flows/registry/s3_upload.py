"""Files to S3: small ones in one request, large ones in parts. A killed upload is gone on with: S3 keeps finished parts, and
a part counts as finished when its MD5 is that of the same piece of this file."""

from __future__ import annotations

import hashlib
import time
from pathlib import Path
from typing import Any, BinaryIO

from flows.registry.s3_faults import GARBLED, GONE, code_of
from stages.contracts.progress import progress

PART_BYTES = 8 << 20  # at least 5 MiB by S3's rules
_MOST_PARTS = 9_000  # S3 takes 10,000
_LOST = GONE | {"NoSuchUpload"}


def part_bytes(size: int) -> int:
    """Of one file always the same, so that a later try fits the parts of an earlier one."""
    return max(PART_BYTES, -(-size // _MOST_PARTS))


def put_file(client: Any, bucket: str, key: str, path: Path, tries: int) -> None:
    """Upload a file whole; it appears under its key when the last byte is there.

    Raises:
        BotoCoreError, ClientError: of the last try.
    """
    from botocore.exceptions import ClientError

    size = path.stat().st_size
    for last in [*[False] * (tries - 1), True]:
        try:
            if size <= part_bytes(size):
                client.put_object(Bucket=bucket, Key=key, Body=path.read_bytes())
            else:
                _in_parts(client, bucket, key, path, size)
            return
        except ClientError as error:
            # Garbled on the way; or another writer of the same bytes finished this upload, or it was aborted.
            if code_of(error) not in _LOST | GARBLED or last:
                raise
            if code_of(error) in _LOST and _size(client, bucket, key) == size:
                return


def _in_parts(client: Any, bucket: str, key: str, path: Path, size: int) -> None:
    step = part_bytes(size)
    upload, there = _begun(client, bucket, key)
    parts: list[dict[str, Any]] = []
    with path.open("rb") as file, progress(size >> 20, f"upload {key.rsplit('/', 1)[-1][:12]}", "MiB") as advance:
        for number, at in enumerate(range(0, size, step), start=1):
            piece = _read(file, at, step)
            tag = f'"{hashlib.md5(piece, usedforsecurity=False).hexdigest()}"'
            if there.get(number) != (tag, len(piece)):
                told = client.upload_part(Bucket=bucket, Key=key, UploadId=upload, PartNumber=number, Body=piece)
                tag = told["ETag"]
            parts.append({"PartNumber": number, "ETag": tag})
            advance(len(piece) >> 20)
    client.complete_multipart_upload(Bucket=bucket, Key=key, UploadId=upload, MultipartUpload={"Parts": parts})


def _read(file: BinaryIO, at: int, size: int) -> bytes:
    file.seek(at)
    return file.read(size)


def _begun(client: Any, bucket: str, key: str) -> tuple[str, dict[int, tuple[str, int]]]:
    """The newest unfinished upload of this key and its parts, (ETag, size) by number; or a new one."""
    told = client.list_multipart_uploads(Bucket=bucket, Prefix=key).get("Uploads", [])
    begun = sorted((u for u in told if u["Key"] == key), key=lambda u: u["Initiated"])
    if not begun:
        return client.create_multipart_upload(Bucket=bucket, Key=key)["UploadId"], {}
    upload = begun[-1]["UploadId"]
    pages = client.get_paginator("list_parts").paginate(Bucket=bucket, Key=key, UploadId=upload)
    return upload, {p["PartNumber"]: (p["ETag"], p["Size"]) for page in pages for p in page.get("Parts", [])}


def _size(client: Any, bucket: str, key: str) -> int | None:
    from botocore.exceptions import ClientError

    try:
        return client.head_object(Bucket=bucket, Key=key)["ContentLength"]
    except ClientError as error:
        if code_of(error) in GONE:
            return None
        raise


def abort_unfinished(client: Any, bucket: str, prefix: str, older_than_s: float) -> list[str]:
    """End uploads that nobody went on with; gives their keys."""
    ended: list[str] = []
    for page in client.get_paginator("list_multipart_uploads").paginate(Bucket=bucket, Prefix=prefix):
        for one in page.get("Uploads", []):
            if one["Initiated"].timestamp() < time.time() - older_than_s:
                client.abort_multipart_upload(Bucket=bucket, Key=one["Key"], UploadId=one["UploadId"])
                ended.append(one["Key"])
    return ended
