"""`${NAME}` and `${NAME:-default}` in the texts of a document; `$${` stands for `${`.

A default counts where the variable is unset or empty, as in the shell, and has no braces in it, so
that nothing nests. What was put in is not looked at again.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Final

from forebay.checks import is_secret
from forebay.config.document import Items, Node, Text, Where
from forebay.errors import InvalidSetting

_USE: Final = re.compile(r"\$\$\{|\$\{(?:([A-Za-z_]\w*)(?::-([^{}]*))?\})?", re.ASCII)


def substitute(node: Node, env: Mapping[str, str]) -> None:
    """Puts the variables in, all the way down, and marks what errors must not show."""
    if isinstance(node, Text):
        _substitute_text(node, env)
        return
    for below in node.values if isinstance(node, Items) else node.items.values():
        substitute(below, env)


def _substitute_text(node: Text, env: Mapping[str, str]) -> None:
    written = node.text
    if is_secret(node.where.path):
        node.shown = "***"
    elif any(is_secret(use[1]) for use in _USE.finditer(written) if use[1]):
        node.shown = repr(written)
    node.text = _USE.sub(lambda use: _value(use, node.where, env), written)


def _value(use: re.Match[str], where: Where, env: Mapping[str, str]) -> str:
    if use[0] == "$${":
        return "${"
    name, default = use[1], use[2]
    if name is None:
        raise InvalidSetting(
            f"{where}: neither ${{NAME}} nor ${{NAME:-default}}; write $${{ for the characters ${{"
        )
    value = env.get(name)
    if default is not None:
        return value or default
    if value is None:
        raise InvalidSetting(
            f"{where}: the environment variable {name} is not set; set it, or write "
            f"${{{name}:-default}}"
        )
    return value
