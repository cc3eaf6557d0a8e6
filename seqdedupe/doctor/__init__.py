"""Data directories, examined and salvaged while no sidecar runs on them."""
