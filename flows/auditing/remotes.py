"""DVC remotes as the audit reads them: a folder or a bucket that holds files under files/md5/ab/cdef…, which DVC's own
documentation describes. Nothing is fetched into the cache: an audit leaves no trace.
"""

from __future__ import annotations

import configparser
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any, BinaryIO, Protocol, cast
from urllib.parse import urlsplit

from stages.contracts.errors import LineError

_KEPT_IN_MEMORY = 1 << 26


class Remote(Protocol):
    def where(self, md5: str) -> str: ...

    def opener(self, md5: str) -> Callable[[], BinaryIO] | None:
        """How to open the file of this hash, or nothing when the remote lacks it.

        Raises:
            Unreached: the remote does not answer.
        """
        ...


class Unreached(LineError):
    """A remote that is configured and does not answer."""


class FolderRemote:
    """A folder on this machine or a mounted one."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def where(self, md5: str) -> str:
        return str(self.folder / "files/md5" / md5[:2] / md5[2:])

    def opener(self, md5: str) -> Callable[[], BinaryIO] | None:
        path = Path(self.where(md5))
        return (lambda: path.open("rb")) if path.is_file() else None


class BucketRemote:
    """S3, or what speaks its protocol. Keys and regions come from the environment or the usual files, as for DVC."""

    def __init__(self, bucket: str, prefix: str, endpoint: str | None) -> None:
        import boto3

        self.bucket, self.prefix = bucket, prefix.strip("/")
        self.client: Any = boto3.client("s3", endpoint_url=endpoint)  # pyright: ignore[reportUnknownMemberType]

    def _key(self, md5: str) -> str:
        return "/".join(p for p in (self.prefix, "files/md5", md5[:2], md5[2:]) if p)

    def where(self, md5: str) -> str:
        return f"s3://{self.bucket}/{self._key(md5)}"

    def opener(self, md5: str) -> Callable[[], BinaryIO] | None:
        from botocore.exceptions import BotoCoreError, ClientError

        try:
            self.client.head_object(Bucket=self.bucket, Key=self._key(md5))
        except ClientError as error:
            code = str(cast("dict[str, Any]", error.response).get("Error", {}).get("Code"))
            if code in ("404", "NoSuchKey", "NotFound"):
                return None
            raise self._unreached(code) from error
        except BotoCoreError as error:
            raise self._unreached(str(error)) from error
        return lambda: self._fetched(md5)

    def _fetched(self, md5: str) -> BinaryIO:
        file = tempfile.SpooledTemporaryFile(_KEPT_IN_MEMORY)  # noqa: SIM115 (the caller closes it)
        self.client.download_fileobj(self.bucket, self._key(md5), file)
        file.seek(0)
        return cast("BinaryIO", file)

    def _unreached(self, got: str) -> Unreached:
        return Unreached(
            "A DVC remote does not answer",
            where=f"s3://{self.bucket}/{self.prefix}",
            expected="a bucket that this user may read",
            got=got,
            do="look at its address in .dvc/config and at the credentials in the environment",
        )


def _configuration(root: Path) -> configparser.ConfigParser:
    told = configparser.ConfigParser(interpolation=None)
    told.read([root / ".dvc/config", root / ".dvc/config.local"])
    return told


def cache_folder(root: Path) -> Path:
    """Where DVC's cache lies, which may be a folder that several clones share."""
    return root / ".dvc" / _configuration(root).get("cache", "dir", fallback="cache") / "files/md5"


def remotes(root: Path) -> list[Remote]:
    """The remotes of .dvc/config and .dvc/config.local that this audit can read."""
    told = _configuration(root)
    found: list[Remote] = []
    for section in told.sections():
        if not section.strip("'").startswith("remote "):
            continue
        url = told.get(section, "url", fallback="")
        parts = urlsplit(url)
        if parts.scheme == "s3":
            endpoint = told.get(section, "endpointurl", fallback=None)
            found.append(BucketRemote(parts.netloc, parts.path, endpoint))
        elif parts.scheme in ("", "file") and url:
            folder = Path(parts.path if parts.scheme else url)
            found.append(FolderRemote(folder if folder.is_absolute() else (root / ".dvc" / folder)))
    return found
