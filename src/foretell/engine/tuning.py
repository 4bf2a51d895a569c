"""The constants by which drafting is budgeted.

They were set by hand, and checked on simulated machines and histories: passes whose further tokens cost nothing, 3 %,
10 % or 30 % of the first one, drafters that take 2 to 60 % of a pass, chances of 0.3 to 0.9 a token, 1 to 64 requests,
and other programs on the processor. `python tools/fit_budget.py` prints the speed in each of them over that of plain
decoding and of the best fixed number of drafts; `python tools/fit_budget.py NAME VALUE…` compares values of one.
"""

PRIOR_SLOPE = 0.03
"""Time of a further token over that of a pass over one, before any is measured."""
PRIOR_PASSES = {
    "avx2": {1: 1.0, 2: 1.0, 4: 1.3, 8: 2.5, 16: 4.8, 32: 8.5},
    "avx512+bf16+vnni": {1: 1.0, 4: 1.15, 8: 1.5, 16: 2.6, 32: 5.0},
}
"""Times of passes over so many tokens over that of one by the instructions of the CPU kernels, before any is measured:
4-bit weights, two cores, `foretell bench step --tokens 1,2,4,8,16,32 --no-engine` (docs/benchmarks.md, "Instruction
sets"). Other kernels begin with `PRIOR_SLOPE`.
"""
PRIOR_DRAFT = 0.1
"""Time of drafting over that of a plain pass, before it is measured."""
PRIOR_READING, LEAST_UNREAD = 0.005, 16
"""Time of reading a token that a drafter has not read over that of a plain pass of one request, before it is measured:
too low a guess costs one reading, too high a one all of them. And tokens of a request from which on reading is told
from drafting.
"""
TOKENS_A_STEP = 2.0
"""Tokens to come of a request for each step that has to pay for its reading: a step gives several, and drafting may
end before.
"""
LEAST_PROMPT = 64
"""Tokens of prompts from which on all tokens of a pass are assumed to take as long as those of others alike."""
PRIOR_SURVIVAL = 0.7
"""Probability that a draft without a score is accepted if its parent is, before any is seen."""
PRIOR_WEIGHT = 8.0
"""Weight of a prior chance, in drafts: a speculator's own probabilities are close to its acceptance."""
PRIOR_PROMISE = 1.0, 4.0
"""Accepted tokens and drafts of a request's step before any is seen."""
REQUEST_WEIGHT = 8.0
"""Weight of the method's chances against those of a single request, in accepted tokens."""
OFFER_WEIGHT = 4.0
"""Weight of what a drafter offers for all requests against what it offers for a single one, in steps."""
MOST_FACTOR = 1.5
"""Most by which the chances of a request exceed those of its method."""
FADING = 0.95
"""Share of a request's counts that is kept per step."""
MEMORY = 512.0
"""Drafts of a kind, and steps of a drafter, after which older ones begin to fade."""
KEPT_DRAFTS = 64.0
"""Weight of what an earlier process has counted, in drafts of a kind and steps."""
ROW_SLOPE = 0.1
"""Time of drafting for a further request over that for the first one, before it is measured: too low a guess is
corrected by the first steps, too high a one by none (`eagle3`, two AVX2 cores, 1 and 16 requests: 0.1).
"""
LEVEL_SHARE = 0.5
"""Time of a further level over the mean time of a level, before trees of several depths are measured: the first one
reads what the target has accepted.
"""
CHILD_SHARE = 0.8
"""Expected accepted tokens that a level adds, over the score of the best node that it expands."""
FLOOR_SLACK = 0.7
"""A draft is grown if its chance is at least this share of the least one that pays: the next step's may differ."""
MOST_EXPANDED = 0.9
"""Greatest least score of a node that is expanded."""
FIRST_STEPS = 3
"""Steps of a drafter before its times decide: the first one often takes ten times as long as the others."""
ROOM = 8
"""Tokens that a request must still get to count in what a drafter offers: a shorter rest cuts its trees."""
QUANTILE = 0.3
"""Share of the measured times that are below the estimate: other programs on the processor only add time, and with
half of the steps disturbed this one is still an undisturbed one.
"""
EXPECTED_TIMES = 2
"""Times that what is expected of a size counts for when it is seen first: a longer time is believed after six of it. A
guess counts once: nothing was measured that it could follow from.
"""
MOST_DISTURBED, MOST_UNSURE = 4.0, 1.5
"""A time counts for at most this many times what is expected of its size: a pause of the process makes it any length.
And those before the first plain pass, which tells what to expect: for so many times that.
"""
WINDOW = 64
"""Last times of a size that are kept."""
DRIFT_WINDOW = 24
"""Last passes that say how fast the machine is now: fewer than a size keeps, so that another speed is noticed before it
goes into the times.
"""
FOLLOWED = 0.98
"""Power of the deviation of these that counts as the machine's speed; the rest goes into the times."""
PLAIN_INTERVALS = 8, 256
"""Steps of a load without a plain pass after which one is measured: the first time, and later."""
TRIAL_REQUESTS, TRIAL_STEPS, TRIAL_NODES = 2, 4, 4
"""Size of a trial of a drafter that does not pay: requests, steps (1 of drafters that read no text: others need a pass
before they draft again, and the time of the first one is not learned), and drafts that are verified beyond those that
pay.
"""
TRIAL_SHARE = 0.01
"""Share of the time that trials take at most."""
TRIAL_INTERVAL, COSTLY_INTERVAL = 4, 64
"""Least number of steps between two trials, and between two that read a text or verify drafts that do not pay."""
OFF, ON = 1.0, 1.05
"""Rates over those without a drafter below which it is no longer asked, and from which on it is asked again: of two
that are nearly equal, the one that seems better is mostly the one whose times were measured too short.
"""
READING_GAIN = 1.05
"""Least rate over that without a drafter for which it reads what it has not read of a request: what is read may not be
drafted from.
"""
OFF_STEPS, MOST_OFF_STEPS = 8, 64
"""Steps that a drafter which does not pay stays off before it is weighed again, the first time and at most: weighing
takes time, too.
"""
MOST_LOSS = 0.03
"""Share of its plain time that a request may lose over its life."""
HORIZON = 64
"""Tokens to come that count in this life."""
NEAR_STEPS, LATE_WEIGHT = 32, 4.0
"""Steps before its deadline from which on a request counts as late, and what a token of it is worth then."""
MOST_PRIORITY = 2
"""Steps of priority that count; each doubles the worth of a token."""
OWN_PRIOR, OWN_WEIGHT, OWN_COST = 0.7, 3.0, 0.1
"""Of chains whose text depends on their length, which no time may choose: prior chance of a token and its weight, and
the time of drafting a token over that of a pass.
"""
