"""What differs between two JSON values, for people. Knows nothing of what they mean."""

import json


def differences(old: object, new: object, where: str = "") -> list[str]:
    """What differs between two JSON values, one line each: `settings.bits was 4, is 8`."""
    if isinstance(old, dict) and isinstance(new, dict):
        keys = sorted({*old, *new})
        return [
            line
            for key in keys
            for line in differences(old.get(key), new.get(key), f"{where}.{key}" if where else str(key))
        ]
    return [] if old == new else [f"{where or 'it'} was {_short(old)}, is {_short(new)}"]


def _short(value: object) -> str:
    text = json.dumps(value, ensure_ascii=False)
    return text if len(text) <= 40 else text[:37] + "…"
