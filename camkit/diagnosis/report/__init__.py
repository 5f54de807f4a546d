"""The reports of a diagnosis: terminal, JSON and picture, one file each."""
