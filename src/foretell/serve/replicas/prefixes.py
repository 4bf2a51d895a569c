"""Which replica has read the beginning of a prompt before: the index that requests are routed by.

A prompt is cut into blocks, and a block is known by a hash of everything up to its end, as in vLLM's prefix cache and
in the routers of SGLang and llm-d. The index holds what was routed, not what the replicas still have in their caches.
"""

from collections import OrderedDict
from collections.abc import Hashable, Mapping
from dataclasses import dataclass
from hashlib import blake2b
from typing import Generic, TypeVar

from pydantic_core import to_json

from foretell.utils.validation import parse_object

BLOCK_BYTES = 256
"""Bytes of JSON in a block; about 60 tokens."""
MAX_BLOCKS = 128
"""Blocks of a prompt that are compared."""
BLOCKS_PER_REQUEST = 8
"""So many known blocks are worth as much as one running request less: reading some 500 tokens takes about as long as a
short answer in a batch (SmolLM2 on two cores).
"""
MAX_ENTRIES = 1 << 16
"""Blocks in the index; those that were not used for the longest time leave first."""
KEY_FIELDS = ("cache_salt", "prompt_cache_key")
"""Fields whose value keeps requests together, whatever their prompts are."""
PROMPT_FIELDS = ("model", "tools", "functions", "system", "instructions", "messages", "input", "prompt")
"""Fields that make up a prompt, in the order of most chat templates."""
_HASH_BYTES = 8

R = TypeVar("R", bound=Hashable)


@dataclass(frozen=True)
class Prefix:
    """The beginning of a prompt. `keyed`: the first block is the client's own key."""

    blocks: tuple[bytes, ...] = ()
    keyed: bool = False


def prefix_of(body: bytes, api_key: int | None = None) -> Prefix:
    """The prefix of a request. Clients with other API keys share no prefixes, as their caches are apart.

    It is empty where the body is no JSON object, which the replica will refuse.
    """
    try:
        fields = parse_object(body)
    except ValueError:
        return Prefix()
    keys = [fields.get(name) for name in KEY_FIELDS]
    keyed = any(keys)
    text = b"".join(to_json(fields[name]) for name in PROMPT_FIELDS if fields.get(name))
    digest = _hash(to_json([api_key, *keys]))
    blocks = [digest] if keyed else []
    for end in range(BLOCK_BYTES, min(len(text), MAX_BLOCKS * BLOCK_BYTES) + 1, BLOCK_BYTES):
        digest = _hash(digest + text[end - BLOCK_BYTES : end])
        blocks.append(digest)
    return Prefix(tuple(blocks), keyed)


def _hash(data: bytes) -> bytes:
    return blake2b(data, digest_size=_HASH_BYTES).digest()


class PrefixIndex(Generic[R]):
    """Replicas by the blocks that were routed to them. `most`: requests that a known prefix is worth at most."""

    def __init__(self, most: float, max_entries: int = MAX_ENTRIES) -> None:
        self._most, self._max_entries = most, max_entries
        self._readers: OrderedDict[bytes, set[R]] = OrderedDict()
        """Replicas by block, those used last at the end."""
        self._routed: OrderedDict[R, None] = OrderedDict()
        """Replicas, the one routed to last at the end."""

    def rank(self, prefix: Prefix, loads: Mapping[R, int]) -> list[R]:
        """The replicas of `loads` (running requests of each), best first.

        The best has few requests and has read much of the prefix; among equals, the one that was not used for the
        longest time.
        """
        known = self._known_blocks(prefix)
        age = {replica: number for number, replica in enumerate(self._routed, 1)}

        def cost(replica: R) -> tuple[float, int]:
            blocks = known.get(replica, 0)
            worth = self._most if prefix.keyed and blocks else min(blocks / BLOCKS_PER_REQUEST, self._most)
            return loads[replica] - worth, age.get(replica, 0)

        return sorted(loads, key=cost)

    def record(self, prefix: Prefix, replica: R) -> None:
        """A request with this prefix was routed to the replica."""
        self._routed[replica] = None
        self._routed.move_to_end(replica)
        for block in prefix.blocks:
            self._readers.setdefault(block, set()).add(replica)
            self._readers.move_to_end(block)
        while len(self._readers) > self._max_entries:
            self._readers.popitem(last=False)

    def forget(self, replica: R) -> None:
        """The replica has ended, and its cache with it."""
        self._routed.pop(replica, None)
        for block in [block for block, readers in self._readers.items() if replica in readers]:
            self._readers[block].discard(replica)
            if not self._readers[block]:
                del self._readers[block]

    def _known_blocks(self, prefix: Prefix) -> dict[R, int]:
        """By replica, how many blocks it has read from the first one on."""
        known = dict[R, int]()
        for number, block in enumerate(prefix.blocks):
            readers = {r for r in self._readers.get(block, ()) if known.get(r, 0) == number}
            if not readers:
                break
            known |= dict.fromkeys(readers, number + 1)
        return known
