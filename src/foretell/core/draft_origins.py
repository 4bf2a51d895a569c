"""Which part of a method drafted a token, for requests that ask for it."""

from collections.abc import Collection, Sequence

from foretell.core.tree import TokenTree

Path = tuple[int, ...]
"""Tokens from the root of the drafts, which is excluded, down to a node."""


class DraftOrigins:
    """Origins of the drafts of a step by row of the engine and path; only those of `rows` are kept.

    A draft without a record comes from the drafter of the request's method.
    """

    def __init__(self, rows: Collection[int]) -> None:
        self._by_row: dict[int, dict[Path, str]] = {row: {} for row in rows}

    def asks(self, row: int) -> bool:
        """Whether the origins of a row are kept."""
        return row in self._by_row

    def record(self, row: int, path: Path, origin: str) -> None:
        """Keep the origin of the draft at the end of a path; an earlier record is replaced."""
        if row in self._by_row:
            self._by_row[row][path] = origin

    def record_tree(self, rows: Sequence[int], tree: TokenTree, origin: str) -> None:
        """Keep the origin of all drafts of a tree."""
        for i, row in enumerate(rows):
            if row in self._by_row:
                self._by_row[row].update(dict.fromkeys(draft_paths(tree, i).values(), origin))

    def find(self, row: int, path: Path, default: str) -> str:
        """The origin of the draft at the end of a path."""
        return self._by_row[row].get(path, default)


def draft_paths(tree: TokenTree, row: int) -> dict[int, Path]:
    """The paths to all drafts of a row of a tree, by node."""
    token, parent, first = tree.token[row].tolist(), tree.parent[row].tolist(), int(tree.prefix_length[row])
    paths: dict[int, Path] = {first - 1: ()}
    for node, valid in enumerate(tree.valid[row].tolist()[first:], first):
        if valid:
            paths[node] = (*paths[parent[node]], token[node])
    del paths[first - 1]
    return paths
