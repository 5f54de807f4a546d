"""The config of all commands: ``camkit.toml``, or the ``[tool.camkit]`` table of ``pyproject.toml``."""
