"""Check a JSON document against `schema.json` with the standard library alone.

Serving must not depend on a validator package, and a rule must not be written twice: this reads the same schema file that
`jsonschema` reads in the tests, and knows just the keywords that the file uses. The tests hold the two to the same verdicts.
"""

from __future__ import annotations

import json
from functools import cache
from pathlib import Path

_TYPES = {"object": (dict,), "array": (list,), "string": (str,), "integer": (int,), "number": (int, float), "boolean": (bool,)}


@cache
def tables() -> dict:
    """The schema of the files in autotune_configs/."""
    return json.loads(Path(__file__).with_name("schema.json").read_text(encoding="utf-8"))


def errors(value, schema: dict | None = None, where: str = "") -> list[str]:
    """Every fault of `value`, each as "rows[2].config: unknown key 'BLOK_M'"; empty when it conforms."""
    schema = tables() if schema is None else schema
    if "$ref" in schema:
        return errors(value, tables()["$defs"][schema["$ref"].rsplit("/", 1)[1]], where)
    at = where or "document"
    if "const" in schema and value != schema["const"]:
        return [f"{at}: must be {schema['const']!r}, got {value!r}"]
    if "enum" in schema and (isinstance(value, bool) or value not in schema["enum"]):
        return [f"{at}: must be one of {', '.join(map(str, schema['enum']))}, got {value!r}"]
    if "anyOf" in schema:
        attempts = [errors(value, option, where) for option in schema["anyOf"]]
        if all(attempts):
            return [" or ".join(dict.fromkeys(attempt[0] for attempt in attempts))]
    kind = schema.get("type")
    if kind and (not isinstance(value, _TYPES[kind]) or (isinstance(value, bool) and kind != "boolean")):
        return [f"{at}: must be of type {kind}, got {value!r}"]
    if "minimum" in schema and value < schema["minimum"]:
        return [f"{at}: must be at least {schema['minimum']}, got {value!r}"]
    found = []
    if isinstance(value, dict):
        known = schema.get("properties", {})
        found += [f"{at}: missing key {name!r}" for name in schema.get("required", ()) if name not in value]
        if schema.get("additionalProperties") is False:
            found += [f"{at}: unknown key {name!r} (known: {', '.join(known)})" for name in value if name not in known]
        if len(value) < schema.get("minProperties", 0):
            found.append(f"{at}: must not be empty")
        for name in value.keys() & known.keys():
            found += errors(value[name], known[name], f"{where}.{name}" if where else name)
    if isinstance(value, list):
        if len(value) < schema.get("minItems", 0):
            found.append(f"{at}: must not be empty")
        for i, item in enumerate(value):
            found += errors(item, schema.get("items", {}), f"{where}[{i}]")
    for part in schema.get("allOf", ()):
        if not errors(value, part["if"], where):
            found += errors(value, part["then"], where)
    return found
