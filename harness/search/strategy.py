"""The interface that every search has, and the loop that carries out several searches at once. Pure.

Points are whole numbers: values along an axis, or positions in a list.
"""

from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any, Protocol, TypeVar

Question = TypeVar("Question", bound=Collection[int], covariant=True)
Answer = TypeVar("Answer", contravariant=True)
Result = TypeVar("Result", covariant=True)


class Strategy(Protocol[Question, Answer, Result]):
    """A search that asks for points to try next, and learns their results."""

    def ask(self) -> Question:
        """Return the points to try next; none once the search is over."""

    def tell(self, answers: Mapping[int, Answer]) -> None:
        """Learn the results of the points that were asked for; a missing point has no answer."""

    def found(self) -> Result:
        """Return what the search has found so far."""


def drive(
    strategies: Sequence[Strategy[Question, Answer, Any]],
    evaluate: Callable[[Mapping[int, Question]], Mapping[int, Mapping[int, Answer]]],
    after_round: Callable[[], object] = lambda: None,
) -> bool:
    """Ask all open searches, evaluate all their points in one call, tell each, until none asks for more.

    `evaluate` takes and returns points by the search's number. If it returns nothing at all, nothing more can be tried.
    Then the searches are told so, and it is the last round. Returns whether all searches are over.
    """
    while asked := {number: points for number, one in enumerate(strategies) if (points := one.ask())}:
        answers = evaluate(asked)
        for number in asked:
            strategies[number].tell(answers.get(number, {}))
        after_round()
        if not answers:
            return False
    return True
