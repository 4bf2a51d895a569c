"""Options of the methods that retrieve continuations."""

from typing import Annotated

from foretell.catalogue.options.fields import LongestMatch, ShortestMatch, TrieConfidence, TrieNodes, option
from foretell.catalogue.options.shared import TrieOptions


class NgramOptions(TrieOptions):
    """Prompt lookup."""

    num_speculative_tokens: TrieNodes = 10
    prompt_lookup_max: LongestMatch = 3
    prompt_lookup_min: ShortestMatch = 1


class LlmaOptions(NgramOptions):
    """LLMA: prompt lookup in references."""

    num_speculative_tokens: TrieNodes = 15
    confidence_threshold: TrieConfidence = 0.0
    prompt_lookup_max: LongestMatch = 5


class SuffixOptions(TrieOptions):
    """The longest suffix match."""

    prompt_lookup_min: ShortestMatch = 1


class RecyclingOptions(TrieOptions):
    """Token recycling."""

    confidence_threshold: TrieConfidence = 0.06


class SamRecyclingOptions(TrieOptions):
    """Suffix matches and token recycling."""

    num_speculative_tokens: TrieNodes = 7


class PhraseOptions(TrieOptions):
    """Phrase retrieval by hidden state."""

    num_speculative_tokens: TrieNodes = 16
    confidence_threshold: TrieConfidence = 0.04


class RestOptions(PhraseOptions):
    """REST: a datastore."""

    datastore: Annotated[
        str | None,
        option("Directory written by `foretell datastore build`. Unset: the --reference documents are indexed."),
    ] = None
    prompt_lookup_max: Annotated[
        int | None,
        option("Longest match that is looked up, in tokens. Unset: the depth of the datastore, 16 by default.", ge=1),
    ] = None
    prompt_lookup_min: ShortestMatch = 2

    @property
    def unread(self) -> frozenset[str]:
        """A datastore takes the place of references."""
        return frozenset() if self.datastore is None else frozenset({"references"})
