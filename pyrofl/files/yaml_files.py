"""YAML files in which no key is given twice."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import yaml


class _Loader(yaml.SafeLoader):  # type: ignore[misc]
    """Loader that refuses a key that a mapping has twice; YAML takes the last."""

    def construct_mapping(self, node: Any, deep: bool = False) -> dict[Any, Any]:
        keys = [self.construct_object(key, deep=deep) for key, _ in node.value]
        for key, (at, _) in zip(keys, node.value, strict=True):
            if keys.count(key) > 1:
                raise yaml.MarkedYAMLError(
                    problem=f"{key!r} is given more than once; expected one value",
                    problem_mark=at.start_mark,
                )
        mapping: dict[Any, Any] = super().construct_mapping(node, deep)
        return mapping


class _WordLoader(_Loader):
    """Loader that reads yes, no, on, off and dates as words; true and false are Booleans."""


_WordLoader.yaml_implicit_resolvers = {
    letter: [
        (tag, form)
        for tag, form in resolvers
        if not tag.endswith((":bool", ":timestamp")) or (letter in "tTfF" and tag.endswith(":bool"))
    ]
    for letter, resolvers in _Loader.yaml_implicit_resolvers.items()
}


def read_yaml(path: str | Path, *, yes_is_word: bool = False) -> Any:
    """Return the content of a YAML file, or of a JSON file.

    Args:
        path: the file.
        yes_is_word: whether yes, no, on and off are words, as levels of a column often are.

    Raises:
        ValueError: if the file cannot be read or is no YAML.
    """
    try:
        text = Path(path).read_text(encoding="utf-8")
        return yaml.load(text, _WordLoader if yes_is_word else _Loader)
    except (OSError, UnicodeDecodeError, yaml.YAMLError) as error:
        why = " ".join(str(error).replace('"<unicode string>", ', "").split())
        raise ValueError(f"{path} cannot be read: {why}") from error
