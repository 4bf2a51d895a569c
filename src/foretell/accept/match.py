"""Sample from the target, and accept drafts while they match."""

from foretell.accept.base import Acceptor, AcceptResult
from foretell.core.tree import TokenTree
from foretell.distributions.processed import ProcessedDistributions, Reads


class Match(Acceptor):
    """The target's token is sampled once per node; the child that holds it is accepted.

    At temperature 0 this is greedy verification (Stern et al., arXiv 1811.03115). Above it, every new token is sampled
    from the target, so the distribution is exact for any drafts, and a seed gives the tokens of plain decoding.
    Drafters may know the noise that the target samples with (`core.noise`; Daliri et al., arXiv 2408.07978): more of
    their drafts match, and the tokens stay the same.
    """

    label = "match"

    lossless = True
    same_seed = True
    reads = Reads.TOKENS

    def accept(self, tree: TokenTree, row: int, distributions: ProcessedDistributions) -> AcceptResult:
        """Accept a path in the tree of batch row `row`."""
        node, path = tree.root(row), list[int]()
        if node + 1 == tree.nodes:  # Without drafts; what follows takes longer than it seems, once a pass.
            return AcceptResult((), distributions.sample(row, node))
        children, drafted = tree.children(row), tree.token[row].tolist()
        while True:
            token = distributions.sample(row, node)
            step = next((c for c in children.get(node, ()) if drafted[c] == token), None)
            if step is None or not distributions.goes_on(row, step):
                return AcceptResult(tuple(path), token)
            path.append(step)
            node = step
