"""Parts of `scripts/bisect.py`."""
