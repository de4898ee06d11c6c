"""What :mod:`kvatlas.ray` needs, and what does not need Ray."""
