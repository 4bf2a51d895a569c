"""The JSON object of `--speculative-config`, as in vLLM: a method, its draft models and its options."""

from collections.abc import Mapping

from foretell.utils.validation import parse_object, show

_EXAMPLE = '{"method": "ngram", "num_speculative_tokens": 8}'


class SpeculativeConfig:
    """`method`, `model` (draft models, separated by commas), and the options of the method by name.

    The options are not validated here; the method's entry in the catalogue does it, see `Entry.parse_options`.
    """

    def __init__(self, /, method: str | None = None, model: str | None = None, **options: object) -> None:
        self.method, self.model = method, model
        self.options: Mapping[str, object] = options

    @classmethod
    def parse(cls, text: str) -> "SpeculativeConfig":
        """Parse the JSON of `--speculative-config`.

        Raises:
            ValueError: invalid JSON, no object, or a method or model that is no string.
        """
        values = parse_object(text, f"speculative config {text!r}", f"write for example {_EXAMPLE!r}")
        for key in ("method", "model"):
            if not isinstance(values.get(key), str | None):
                raise ValueError(f"speculative config, {key}: must be a string, found {show(values[key])}")
        return cls(**values)
