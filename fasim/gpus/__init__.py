"""The GPU files, one a device."""
