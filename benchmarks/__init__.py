"""Measurements a person can repeat: each prints its figures and fails below its floor."""
