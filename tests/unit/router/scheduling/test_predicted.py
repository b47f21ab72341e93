"""What became of a request's prediction, added up over its steps."""

from __future__ import annotations

import dataclasses

from support.factories import make_request

from router.events import Predicted, Token
from router.scheduling.delivery import keep_predicted
from router.scheduling.entry import Entry
from router.shards.interface import Drafted, Row, StepReply


def entry(*prediction_ids: int) -> Entry:
    return Entry(dataclasses.replace(make_request(), prediction_ids=prediction_ids))


def reply(predicted: dict[int, tuple[int, int]], **num_got: int) -> StepReply:
    """num_got: tokens of the requests, by id after a letter."""
    token = Token(5, "x", -0.5)
    rows = [Row(int(name[1:]), tokens=[token] * number) for name, number in num_got.items()]
    return StepReply(rows=rows, drafted=Drafted(0, 0, 0, predicted=predicted))


def test_steps_add_up_and_a_request_without_a_prediction_has_none():
    foretold, other, plain = entry(1, 2), entry(3), entry()
    entries = {4: foretold, 5: other, 6: plain}
    keep_predicted(reply({4: (2, 1), 8: (1, 1)}, r4=3, r6=1), entries)
    keep_predicted(reply({4: (3, 0)}, r4=4), entries)
    keep_predicted(StepReply(), entries)
    assert (foretold.predicted, other.predicted, plain.predicted) == (Predicted(5, 1), Predicted(), None)


def test_a_rejected_draft_leaves_one_plain_token():
    foretold = entry(1)
    keep_predicted(reply({4: (0, 3)}), {4: foretold})
    assert foretold.predicted == Predicted(0, 3)


def test_what_is_behind_the_end_of_an_answer_is_not_in_it():
    foretold = entry(1)
    keep_predicted(reply({4: (5, 1)}, r4=2), {4: foretold})
    assert foretold.predicted == Predicted(2, 4)
