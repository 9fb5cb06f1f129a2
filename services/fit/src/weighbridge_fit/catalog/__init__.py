"""The catalogue: models that are known before they are on this machine."""
