"""Where a source's bytes stand: a file, a folder, a glob, or objects of an S3 bucket; each is opened when its turn comes.

S3 is reached through boto3 and its own settings (AWS_ENDPOINT_URL, AWS_PROFILE, AWS_ACCESS_KEY_ID, …); an object is read in
ranges, all of one version of it.
"""

from __future__ import annotations

import errno
import glob
import io
import os
import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

from stages.contracts.errors import DataError

_SUFFIXES = (".jsonl", ".ndjson", ".json", ".parquet", ".arrow", ".feather")
_PACKED = (".gz", ".zst", ".zstd")
_ABOUT = {"state.json", "dataset_info.json", "dataset_dict.json"}  # what `save_to_disk` writes beside the rows
_RANGE_BYTES = 8 << 20


@dataclass(frozen=True)
class Blob:
    """One file of a source. `name` is what a reject names, `where` what an error names; `open` gives a seekable stream."""

    name: str
    where: str
    open: Callable[[], BinaryIO]


def find(path: str) -> list[Blob]:
    """The files that `path` names, in the order of their names: a file, a folder (its files of rows, links followed), a
    glob, or the same with s3://bucket/ before it. What is there under that very name is no glob.

    Raises:
        DataError: none is there, a link leads nowhere, or a folder holds several splits.
    """
    if path.startswith("s3://"):
        return _objects(path)
    root = Path(path)
    if _is_folder(root):
        names = sorted(str(p.relative_to(root)) for p in _below(root, ()))
        return [_file(root / n, n) for n in _rows_of(path, names)]
    if root.is_file():
        return [_file(root, root.name)]
    paths = sorted(Path(p) for p in glob.glob(path, recursive=True) if _leads(Path(p)).is_file())
    if not paths:
        raise _nothing(path)
    base = _fixed_part(path)
    return [_file(p, str(p.relative_to(base)) if base else p.name) for p in paths]


def _below(folder: Path, above: tuple[tuple[int, int], ...]) -> Iterator[Path]:
    """Files below a folder, those behind links too; hidden folders are left out, and links that lead back to one of the
    folders that they stand in, `above` by device and number."""
    about = folder.stat()
    own = (about.st_dev, about.st_ino)
    if own in above:
        return
    for path in folder.iterdir():
        if path.name.startswith("."):
            continue
        if _leads(path).is_dir():
            yield from _below(path, (*above, own))
        elif path.is_file():
            yield path


def _leads(path: Path) -> Path:
    """The same path. Raises DataError when it is a link to nothing."""
    if path.is_symlink() and not path.exists():
        raise DataError(
            "A source holds a link that leads nowhere",
            where=str(path),
            expected="a file or a folder behind it: what is not read cannot be counted",
            got=f"a link to {os.readlink(path)}",
            do="mend the link, or remove it",
        )
    return path


def _is_folder(path: Path) -> bool:
    try:
        return path.is_dir()
    except OSError as error:
        if error.errno != errno.ENAMETOOLONG:
            raise
        raise DataError(
            "A source's path is longer than the file system allows",
            where=f"{str(path)[:80]}… ({len(str(path))} characters)",
            expected="names of at most 255 bytes, and not above 4,096 in all",
            got=str(error.strerror),
            do="mend `path` of this source in params.yaml",
        ) from error


def _file(path: Path, name: str) -> Blob:
    return Blob(name, str(path), lambda: path.open("rb"))


def _fixed_part(path: str) -> Path | None:
    """The folder above the first wildcard: names below it tell files of equal names apart."""
    if not glob.has_magic(path):
        return None
    parts = Path(path).parts
    first = next(i for i, part in enumerate(parts) if glob.has_magic(part))
    return Path(*parts[:first]) if first else Path()


def _rows_of(path: str, names: Sequence[str]) -> list[str]:
    """The files of a folder that hold rows; what a library wrote about them is left out."""
    if "dataset_dict.json" in names:
        splits = sorted({n.split("/")[0] for n in names if "/" in n})
        raise DataError(
            "A source's folder holds several splits",
            where=path,
            expected="the folder of one split",
            got=", ".join(splits),
            do=f"name one in `path`, as {path.rstrip('/')}/{splits[0] if splits else 'train'}",
        )
    kept = [n for n in names if _is_rows(n.rsplit("/", 1)[-1]) and not any(p.startswith(".") for p in n.split("/"))]
    if not kept:
        raise _nothing(path)
    return kept


def _is_rows(name: str) -> bool:
    for packed in _PACKED:
        name = name.removesuffix(packed)
    return name.endswith(_SUFFIXES) and name not in _ABOUT


def _nothing(path: str) -> DataError:
    return DataError(
        "A source has no file",
        where=path,
        expected="at least one file of rows: " + ", ".join(_SUFFIXES) + ", packed or not",
        do="put it there, or mend `path` of this source in params.yaml",
    )


def _objects(path: str) -> list[Blob]:
    bucket, _, pattern = path.removeprefix("s3://").partition("/")
    client = _client(path)
    magic = re.search(r"[*?\[]", pattern)
    prefix = pattern[: magic.start()] if magic else pattern
    found = dict(_listing(client, bucket, prefix, path))
    if pattern in found:
        keys, cut = [pattern], pattern.rfind("/") + 1
    elif magic:
        wanted = _wildcards(path, pattern)
        keys = sorted(k for k in found if wanted.fullmatch(k))
        cut = prefix.rfind("/") + 1
    else:
        cut = len(pattern.rstrip("/")) + 1 if pattern else 0
        below = sorted(k[cut:] for k in found if k.startswith(pattern.rstrip("/") + "/" if pattern else ""))
        keys = [pattern.rstrip("/") + "/" + n if pattern else n for n in _rows_of(path, below)]
    if not keys:
        raise _nothing(path)
    return [_object(client, bucket, key, found[key], key[cut:]) for key in keys]


def _object(client: Any, bucket: str, key: str, about: tuple[int, str], name: str) -> Blob:
    size, etag = about
    return Blob(
        name,
        f"s3://{bucket}/{key}",
        lambda: io.BufferedReader(_Ranges(client, bucket, key, size, etag), _RANGE_BYTES),
    )


def _client(path: str) -> Any:
    import boto3
    from botocore.config import Config
    from botocore.exceptions import BotoCoreError

    try:
        return boto3.client("s3", config=Config(retries={"mode": "standard", "max_attempts": 6}, read_timeout=60))
    except (BotoCoreError, ValueError) as error:
        raise DataError(
            "The settings for S3 cannot be used",
            where=f"the environment and ~/.aws/config, for {path}",
            expected="AWS_ENDPOINT_URL with its http:// or https://, and an AWS_PROFILE that is there, where they are set",
            got=str(error)[:300],
            do="mend the setting named, or unset it",
        ) from error


def _listing(client: Any, bucket: str, prefix: str, path: str) -> Iterator[tuple[str, tuple[int, str]]]:
    from botocore.exceptions import BotoCoreError, ClientError

    try:
        for page in client.get_paginator("list_objects_v2").paginate(Bucket=bucket, Prefix=prefix):
            for found in page.get("Contents", []):
                if not found["Key"].endswith("/"):
                    yield found["Key"], (found["Size"], found["ETag"])
    except (BotoCoreError, ClientError) as error:
        raise DataError(
            "A source's bucket cannot be listed",
            where=path,
            expected="a bucket that the credentials in the environment may list",
            got=str(error)[:300],
            do="check AWS_ENDPOINT_URL and the credentials, or mend `path` of this source in params.yaml",
        ) from error


def _wildcards(path: str, pattern: str) -> re.Pattern[str]:
    try:
        return _as_regex(pattern)
    except re.error as error:
        raise DataError(
            "A source's path has wildcards that cannot be read",
            where=path,
            expected="`*`, `**/`, `?`, and characters in brackets, of a range the lower first",
            got=str(error),
            do="mend `path` of this source in params.yaml",
        ) from error


def _as_regex(pattern: str) -> re.Pattern[str]:
    """A glob as a regular expression over keys: `*` and `?` keep to one folder, `**/` is any number of them."""
    parts = re.split(r"(\*\*/|\*\*|\*|\?|\[[^\]]*\])", pattern)
    words = {"**/": "(?:.*/)?", "**": ".*", "*": "[^/]*", "?": "[^/]"}
    return re.compile("".join(words.get(p) or (p.replace("[!", "[^") if p[:1] == "[" else re.escape(p)) for p in parts))


class _Ranges(io.RawIOBase):
    """An object as a file: each read asks for a range of the one version that was listed."""

    def __init__(self, client: Any, bucket: str, key: str, size: int, etag: str) -> None:
        super().__init__()
        self._client, self._bucket, self._key, self._size, self._etag = client, bucket, key, size, etag
        self._at = 0

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def tell(self) -> int:
        return self._at

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        self._at = offset + {io.SEEK_SET: 0, io.SEEK_CUR: self._at, io.SEEK_END: self._size}[whence]
        return self._at

    def readinto(self, buffer: Any) -> int:
        from botocore.exceptions import BotoCoreError, ClientError, IncompleteReadError, ResponseStreamingError

        wanted = min(len(buffer), self._size - self._at)
        if wanted <= 0:
            return 0
        span = f"bytes={self._at}-{self._at + wanted - 1}"
        for last in (False, False, True):
            try:
                told = self._client.get_object(Bucket=self._bucket, Key=self._key, Range=span, IfMatch=self._etag)
                data = told["Body"].read()
            except (IncompleteReadError, ResponseStreamingError) as error:
                if last:
                    raise self._failed(error) from error
                continue
            except (BotoCoreError, ClientError) as error:
                raise self._failed(error) from error
            buffer[: len(data)] = data
            self._at += len(data)
            return len(data)
        raise AssertionError("the last attempt returns or raises")

    def _failed(self, error: BaseException) -> DataError:
        return DataError(
            "An object of a source cannot be read",
            where=f"s3://{self._bucket}/{self._key}",
            expected=f"{self._size} bytes of the version {self._etag} that was listed",
            got=str(error)[:300],
            do="run it again; if the object was replaced meanwhile, it is read anew",
        )
