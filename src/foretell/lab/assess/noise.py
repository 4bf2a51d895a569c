"""Noise in a prompt: changes that leave its meaning, made from a seed."""

import random
from collections.abc import Callable, Mapping

TYPO_DISTANCE = 20
"""Characters per typing error."""


def typing_errors(prompt: str, source: random.Random) -> str:
    """Two neighbouring letters inside a word change places, once per `TYPO_DISTANCE` characters and at least once."""
    letters = list(prompt)
    inside = [i for i in range(1, len(prompt) - 2) if prompt[i - 1 : i + 2].isalpha()]
    places = [i for i in inside if letters[i] != letters[i + 1]]
    for i in sorted(source.sample(places, min(len(places), max(1, len(prompt) // TYPO_DISTANCE)))):
        letters[i], letters[i + 1] = letters[i + 1], letters[i]
    return "".join(letters)


def lower_case(prompt: str, source: random.Random) -> str:
    """No capital letters."""
    return prompt.lower()


def upper_case(prompt: str, source: random.Random) -> str:
    """Capital letters only."""
    return prompt.upper()


def double_spaces(prompt: str, source: random.Random) -> str:
    """Two spaces between words."""
    return prompt.replace(" ", "  ")


def left_out_letters(prompt: str, source: random.Random) -> str:
    """One letter inside a word is missing, once per `TYPO_DISTANCE` characters and at least once."""
    places = [i for i in range(1, len(prompt) - 1) if prompt[i - 1 : i + 2].isalpha()]
    gone = set(source.sample(places, min(len(places), max(1, len(prompt) // TYPO_DISTANCE))))
    return "".join(letter for i, letter in enumerate(prompt) if i not in gone)


def small_talk(prompt: str, source: random.Random) -> str:
    """A sentence before the prompt that has nothing to do with it."""
    return f"{source.choice(_SMALL_TALK)} {prompt}"


_SMALL_TALK = (
    "Good morning, I hope you slept well.",
    "I have written this down for you in a hurry.",
    "The coffee in this place is better than it looks.",
    "My neighbour has painted his fence again.",
)
Noise = Callable[[str, random.Random], str]
NOISES: Mapping[str, Noise] = {
    "typing errors": typing_errors,
    "left-out letters": left_out_letters,
    "lower case": lower_case,
    "upper case": upper_case,
    "double spaces": double_spaces,
    "small talk before": small_talk,
}
"""Every kind of noise by its name."""


def mention(candidate: str) -> str:
    """A sentence that names a wrong candidate without claiming anything about the question."""
    return f"A friend of mine likes to say the word {candidate}."
