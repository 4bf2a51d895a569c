"""Assignments on the command line: NAME=VALUE."""


def split_assignment(text: str, option: str, example: str) -> tuple[str, str]:
    """The two sides of `NAME=VALUE`, without the space around them.

    Raises:
        ValueError: there is no name, no value or no `=`; the message names the option and shows the example.
    """
    name, _, value = (side.strip() for side in text.partition("="))
    if not name or not value:
        raise ValueError(f"{option}: NAME=VALUE was expected, as {example}; found {text!r}")
    return name, value
