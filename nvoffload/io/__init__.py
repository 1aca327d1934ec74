"""Engines: they move bytes between memory and open files. Know nothing of tensors or swap files."""
