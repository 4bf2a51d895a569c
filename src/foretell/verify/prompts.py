"""Built-in prompts of the checks."""

PROMPTS = (
    "Write a Python function that returns the n-th Fibonacci number, then call it for n = 10.",
    "Correct the spelling and change nothing else: The quik brown fox jumps over the lazzy dog. The lazzy dog sleeps, "
    "and the quik brown fox jumps over the lazzy dog again.",
    "Count from 1 to 30 in words, one per line.",
    "Wie heißt die Hauptstadt von Österreich? 请用中文再回答一次。",
)
"""Of unequal length and kind: code, copying, counting, and characters of several bytes."""

SHORT_PROMPTS = ("left right left right left", "hot cold hot cold hot", "one two one two one")
"""Prompts of the distribution test: short, so that samples are cheap; repetitive, so that retrieval methods draft."""
