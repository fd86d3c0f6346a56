"""Glancing: what a directory of this trade is, told from listings, config files and headers; facts first, words apart."""
