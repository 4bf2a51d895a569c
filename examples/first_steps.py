# %% [markdown]
# # First steps
#
# One question, decoded plainly and with three methods: the same text, in fewer passes of the model.

# %%
import foretell

model = foretell.load("smollm2-135m")
question = "Explain in five sentences why the sea is salty."

# %% [markdown]
# A method is named as in `foretell methods`. `generate` takes one prompt or several, and returns an answer for each.

# %%
plain = model.generate(question, method="autoregressive", max_new_tokens=96)[0]
print(plain.text)

# %%
for name in ("ngram", "sam_recycling", "eagle3"):
    answer = model.generate(question, method=name, max_new_tokens=96)[0]
    assert answer.tokens == plain.tokens
    statistics = answer.statistics
    print(
        f"{name:>14}: {statistics.target_passes} passes instead of {plain.statistics.target_passes},"
        f" {statistics.tokens_per_pass:.2f} tokens per pass"
    )

# %% [markdown]
# The answer says what computed it, and whether equality holds bit for bit or up to rounding.

# %%
print(plain.backend, "exact" if plain.exact else "up to rounding")

# %% [markdown]
# A stream gives the text as it is decided: several tokens at a time where drafts were accepted.

# %%
for piece in model.stream(question, method="eagle3", max_new_tokens=32):
    print(piece.text, end="|", flush=True)
print()
