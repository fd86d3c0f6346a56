"""The release registry: releases, and who is production, in a folder or in S3, with the same guarantees.

blobs/<64 hex digits>             a file by its sha256; whole or not there
records/<release name>.json       the release's record, written after every blob it names; never changed
channels/<channel>.json           the channel's last entry: its pointer; moved by conditional writes alone
ledger/<channel>/<number>.json    every entry, in the same bytes
"""
