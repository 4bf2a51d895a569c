"""Skeleton-of-Thought (Ning et al., ICLR 2024, arXiv 2307.15337): the model writes the points of its answer first, then
continues all points at the same time.
"""

from dataclasses import replace
from typing import Literal

from pydantic import Field

from foretell.engine.request import Request, Update
from foretell.plan.base import Plan, PlanRequest, PlanRun, PlanTask, child_request
from foretell.plan.ordered_text import Segment
from foretell.plan.outline import read_skeleton
from foretell.plan.router import Router, TrainedRouter

_TOKENS_PER_POINT = 16
"""Tokens of a skeleton per point; it ends there, and what it has by then counts."""
_MIN_POINTS = 2
"""Fewer points have nothing to be written side by side."""
_MIN_POINT_TOKENS = 8
"""Room for the continuation of a point that a plan is worth it."""
_FIRST_TOKENS = 4
"""A continuation does not end before so many tokens: a small model often ends with the point itself."""
_NO_POINTS = "the router finds no independent points"
_SKELETON = """\
Write only the skeleton of an answer, not the answer itself. The skeleton is a numbered list of 3 to {most} points. \
Each point has 3 to 5 words.

Question: How can I sleep better?
Skeleton:
1. Keep regular hours
2. Avoid late coffee
3. Darken the bedroom
4. Exercise during the day

Question: What makes a good holiday photo?
Skeleton:
1. Soft morning light
2. A clear subject
3. Simple background
4. People in motion
5. Straight horizon

Question: {question}
Skeleton:"""
_POINT = """\
Question: {question}

Skeleton of the answer:
{skeleton}

Explain one point of the skeleton in 1 or 2 short sentences. Do not write about the other points."""
"""Which point it is only the beginning of the reply says: all before it is read once for all points."""


class SkeletonPlan(Plan):
    """Skeleton-of-Thought. Lossy: the answer is another one than the model's own."""

    type: Literal["skeleton"] = "skeleton"
    router: Literal["trained", "prompt", "off"] = "trained"
    """Who decides whether a question gets a skeleton (SoT-R): `trained`: a function of its words, or the model
    where they are hardly English; `prompt`: the model; `off`: every question gets one.
    """
    max_points: int = Field(8, ge=_MIN_POINTS, le=32)
    max_point_tokens: int = Field(128, ge=_MIN_POINT_TOKENS)
    """Most tokens of the continuation of a point."""

    def run(self, task: PlanTask) -> "SkeletonRun":
        """A run that answers a conversation; see `Plan.run`."""
        return SkeletonRun(task, self)


class SkeletonRun(PlanRun):
    """Router, skeleton, points. Where the router refuses, the skeleton has fewer than two points, or there is no room,
    the conversation is answered as it is.
    """

    def __init__(self, task: PlanTask, plan: SkeletonPlan) -> None:
        super().__init__(task, plan.type)
        self._plan = plan
        self._router: Router | None = None
        self._skeleton_number = -1
        """Of the request that writes the skeleton; -1: it was not made yet."""
        self._points: tuple[str, ...] = ()
        self._segments: dict[int, Segment] = {}
        """Of the requests whose text is shown, by their number."""

    def begin(self) -> list[Request]:
        """The questions of the router, the skeleton, or the plain answer."""
        kind = self._plan.router
        takes = TrainedRouter.load().takes_skeleton(self.task.question) if kind == "trained" else kind == "off" or None
        if takes is not None:
            return self._ask_for_skeleton() if takes else self._plain(_NO_POINTS)
        self._router = Router(self.task)
        requests = self._router.requests()
        return requests if all(map(self.task.fits, requests)) else self._plain("no room for the router's prompt")

    def on_update(self, request: PlanRequest, update: Update) -> None:
        """Write the text of points; go on where the router's questions or the skeleton are over."""
        segment = self._segments.get(request.number)
        if segment is not None:
            segment.write(self._shown(request, update), update.tokens)
            segment.closed = request.finish_reason is not None
            return
        self.count(update)
        if request.number == self._skeleton_number:
            self._read(request)
        elif self._router is not None and self._router.observe(request.number, update):
            takes = self._router.takes_skeleton
            self.want(self._ask_for_skeleton if takes else lambda: self._plain(_NO_POINTS))

    @property
    def ending(self) -> tuple[str, str | int | None]:
        """Of the plain answer, or `length` where a point was cut."""
        shown = [self.requests[number] for number in self._segments]
        if self.report.outcome == "plain":
            return shown[-1].finish_reason or "stop", shown[-1].stop_reason
        return "length" if any(r.finish_reason == "length" for r in shown) else "stop", None

    def _shown(self, request: PlanRequest, update: Update) -> str:
        """The text of an update without the blanks that a point begins with."""
        before = request.text.removesuffix(update.text)
        return update.text if self.report.outcome == "plain" or before.strip() else request.text.lstrip()

    def _ask_for_skeleton(self) -> list[Request]:
        prompt = self.task.ask(_SKELETON.format(most=self._plan.max_points, question=self.task.question), "1.")
        tokens = min(_TOKENS_PER_POINT * self._plan.max_points, self.task.request.max_new_tokens)
        request = replace(child_request(self.task, prompt, tokens), stop=("\n\n",))
        if not self.task.fits(request):
            return self._plain("no room for the skeleton")
        self._skeleton_number = len(self.requests)
        return [request]

    def _read(self, request: PlanRequest) -> None:
        """Read the skeleton so far; where it is over, continue its points."""
        finished = request.finish_reason is not None
        skeleton = read_skeleton(f"1.{request.text}", self._plan.max_points, request.finish_reason == "stop")
        if skeleton.is_complete and not finished:
            self.drop([request])
        if finished:
            self._points = skeleton.points
            self.want(self._expand)

    def _expand(self) -> list[Request]:
        """The requests that continue the points, all with the same beginning."""
        points, first = self._points, len(self.requests)
        if len(points) < _MIN_POINTS:
            return self._plain("no points in the skeleton")
        skeleton = "\n".join(f"{i}. {point}" for i, point in enumerate(points, 1))
        # Not the tokens that were written: how many come before the request is cancelled is a matter of time.
        left = self.task.request.max_new_tokens - len(self.task.codec.encode(skeleton, add_special_tokens=False))
        tokens = min(self._plan.max_point_tokens, left // len(points))
        if tokens < _MIN_POINT_TOKENS:
            return self._plain("too few tokens for the points")
        requests, text = list[Request](), _POINT.format(question=self.task.question, skeleton=skeleton)
        for i, point in enumerate(points, 1):
            prompt = self.task.ask(text, f"{i}. {point}:")
            requests.append(replace(child_request(self.task, prompt, tokens, min_tokens=_FIRST_TOKENS), stop=("\n",)))
        if not all(map(self.task.fits, requests)):
            return self._plain("no room for the points")
        for i, point in enumerate(points, 1):
            self.text.append("\n" * (i > 1) + f"{i}. {point}: ", closed=True)
            self._segments[first + i - 1] = self.text.append()
        self.report.outcome, self.report.parts = "expanded", len(points)
        return requests

    def _plain(self, reason: str) -> list[Request]:
        """The conversation as it is."""
        self.report.reason = reason
        self._segments[len(self.requests)] = self.text.append()
        return [self.task.request]
