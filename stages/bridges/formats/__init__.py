"""A file a format: what it looks like on disk and how a sample of it is read. kinds.py loads every module here."""
