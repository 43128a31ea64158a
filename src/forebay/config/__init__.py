"""The configuration file: YAML in, `StoreSettings` out.

In the order that a file goes through: `document` (YAML to nodes that know their line, with
`${NAME}` replaced), `aliases` (Danube's names to ours), `load` (nodes to settings, by the keys that
the settings classes declare, with the sizes and durations of `quantities`). `describe` goes back.

Beware: relative paths in a file are relative to the file's directory, not to the working directory.
The reference for users is docs/guide/configuration.md.
"""

from forebay.config.load import load_config, parse_config, settings_from
from forebay.config.reference import describe

__all__ = ["describe", "load_config", "parse_config", "settings_from"]
