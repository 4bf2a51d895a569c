# %% [markdown]
# # What lossless means when sampling
#
# Two kinds of methods are lossless. Those marked "same seed" give the text of plain decoding for every seed. The others
# use their own random numbers to accept more drafts: another text, from the same distribution. This shows both, by
# counting answers over many seeds. The answers are limited to some colours, so that they can be counted.

# %%
from collections import Counter

import foretell
from foretell import SamplingParams, StructuredOutputs

model = foretell.load("smollm2-135m")
question = "Name a colour. Answer with one word."
colours = StructuredOutputs(choice=["red", "green", "blue", "yellow", "purple", "orange"])


# %%
def answers(method: str, seeds: range) -> list[str]:
    """An answer for each seed; requests of one call are decoded together."""
    requests = [
        model.request(question, SamplingParams(temperature=1.0, seed=s), max_new_tokens=6, structured_outputs=colours)
        for s in seeds
    ]
    engine = model.engine(method, rows=32)
    return [model.codec.decode(list(done.tokens)) for done in engine.complete(requests)]


# %%
seeds = range(96)
plain = answers("autoregressive", seeds)
same_seed = answers("eagle3", seeds)
assert same_seed == plain
print("eagle3 gives the text of plain decoding for every one of", len(seeds), "seeds")

# %%
drawn = answers("draft_model", seeds)
print("draft_model gives the same text for", sum(a == b for a, b in zip(drawn, plain, strict=True)), "of them")
print("plain:      ", Counter(plain).most_common())
print("draft_model:", Counter(drawn).most_common())

# %% [markdown]
# The counts differ by chance only. `foretell verify draft_model --samples 20000` tests that, with the probability that
# a real difference would have been found.
