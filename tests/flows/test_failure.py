"""Which error out of many a person sees."""

import pytest

from flows.failure import one_error
from tasks.errors import ServiceDiedError


def test_the_cause_is_raised_in_place_of_the_group_that_holds_it() -> None:
    inner = ExceptionGroup("inner", [ValueError("beside"), ServiceDiedError("vLLM", "gone")])
    with pytest.raises(ServiceDiedError), one_error():
        raise ExceptionGroup("outer", [KeyError("first"), inner])


def test_without_an_error_of_ours_the_first_is_raised() -> None:
    with pytest.raises(KeyError), one_error():
        raise ExceptionGroup("outer", [KeyError("first"), ValueError("second")])
