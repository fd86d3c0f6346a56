"""Inert: SGLang imports torchvision for images, which a text model never sees, and the real one does not import beside CPU torch."""

__version__ = "0.0.0"
