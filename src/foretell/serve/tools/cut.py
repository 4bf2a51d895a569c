"""Arguments of calls that were cut."""

import json


def completed(text: str) -> str:
    """JSON that was cut as a whole: what is open is closed, and a member without a value is left out. Other texts stay
    as they are.
    """
    if _is_json(text):
        return text
    closers, quoted, escaped, kept = list[str](), False, False, [(0, "")]
    for at, char in enumerate(text):
        if quoted:
            quoted = escaped or char != '"'
            escaped = char == "\\" and not escaped
        elif char == '"':
            quoted = True
        elif char in "{[":
            closers.append("}" if char == "{" else "]")
            kept.append((at + 1, "".join(reversed(closers))))
        elif char in "}]" and closers:
            closers.pop()
        elif char == ",":
            kept.append((at, "".join(reversed(closers))))
    ends = "".join(reversed(closers))
    at, rest = kept[-1]
    tries = [(text + '"' if quoted else text) + ends, text.rstrip(", ") + ends, text[:at] + rest]
    if quoted:
        tries[1:1] = [text[:-cut] + '"' + ends for cut in range(1, min(12, len(text)))]
    return next((one for one in tries if closers and _is_json(one)), text)


def _is_json(text: str) -> bool:
    try:
        json.loads(text)
    except (ValueError, RecursionError):
        return False
    return True
