# %% [markdown]
# # Choose a method for your prompts
#
# Which method is fastest depends on the text: copies pay where answers repeat their prompt. This measures some methods
# on prompts of yours, in turn, and prints tokens per pass and speed over plain decoding.

# %%
from statistics import median

import foretell

model = foretell.load("smollm2-135m")
NOTES = (
    "Meeting of 3 May. Present: Ada, Grace, Alan. Ada reports that the pump in hall 2 leaks. Grace orders a seal."
    " Alan checks the valves on Friday. The next meeting is on 10 May at nine."
)
PROMPTS = {
    "extract": f"{NOTES}\n\nRepeat every sentence that names a date or a day, word by word.",
    "write": "Write a short letter to a friend about a walk in the rain.",
}
METHODS = ("autoregressive", "ngram", "sam_recycling", "eagle3", "hybrid_model")
ROUNDS = 2

# %% [markdown]
# The methods take turns, and a method is built once, so that loading is not measured. Single times scatter: take the
# median of several rounds.

# %%
built = {name: model.method(name) for name in METHODS}
seconds: dict[tuple[str, str], list[float]] = {(p, m): [] for p in PROMPTS for m in METHODS}
tokens_per_pass: dict[tuple[str, str], float] = {}
for _ in range(ROUNDS):
    for prompt, text in PROMPTS.items():
        for name in METHODS:
            statistics = model.generate(text, method=built[name], max_new_tokens=64)[0].statistics
            seconds[prompt, name].append(statistics.decode_seconds / statistics.decode_tokens)
            tokens_per_pass[prompt, name] = statistics.tokens_per_pass

# %%
for prompt in PROMPTS:
    plain = median(seconds[prompt, "autoregressive"])
    print(prompt)
    for name in METHODS:
        speed = plain / median(seconds[prompt, name])
        print(f"  {name:>14}: {tokens_per_pass[prompt, name]:.2f} tokens per pass, {speed:.2f} times plain decoding")

# %% [markdown]
# `foretell bench run --tasks FILE --methods …` does this with a report, error bars and other runtimes beside it.
