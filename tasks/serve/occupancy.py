"""How a flow keeps its servers busy: each server's seconds, by whether it has a request of the flow."""

from collections.abc import Callable

from tasks.observe.spans import Recorder
from tasks.observe.waits import Wait

GENERATING, IDLE = "generating", "idle"


class Occupancy:
    """The spans of one server as who asks it sees them: `generating` while it has a request, else `idle`.

    Args:
        address: of the server, its process among the spans.
        recorder: keeps them.
        is_admitted: True while the server may be asked.
    """

    def __init__(self, address: str, recorder: Recorder, is_admitted: Callable[[], bool]) -> None:
        self._lane = recorder.lane_of(address, f"requests of {recorder.process}")
        self._recorder, self._is_admitted = recorder, is_admitted
        self._n_requests = 0
        self._now = Wait(IDLE, self._lane, self._idle_for)
        recorder.watch(self.look, self.cut)

    def asked(self) -> None:
        """It has one more request."""
        self._n_requests += 1
        if self._n_requests == 1:
            self._be(GENERATING, lambda: "")

    def answered(self) -> None:
        """It has one request less."""
        self._n_requests -= 1
        if not self._n_requests:
            self._be(IDLE, self._idle_for)

    def look(self) -> None:
        """What it is idle for may have changed."""
        self._now.look()

    def cut(self) -> None:
        """Keep the spans so far, of what goes on too."""
        self._now.cut()

    def _be(self, name: str, cause: Callable[[], str]) -> None:
        self._now.end()
        self._now = Wait(name, self._lane, cause)

    def _idle_for(self) -> str:
        """What the step does meanwhile, or that the server is not to be asked."""
        return self._recorder.step_does if self._is_admitted() else "set aside"
