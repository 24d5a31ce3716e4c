"""Worker process of scorers: scores the candidates of one call after another.

The first request is a pickle of the import paths of the scorers, each with its arguments, and the ScoreConfig as JSON. The
following ones are pickled `ScorerCall`s, and their answers pickled lists of ScoreVerdict. The module imports only what its scorers
need, because a worker that replaces a killed one must start fast.
"""

import pickle
from collections.abc import Sequence
from importlib import import_module
from typing import TypeAlias

from rollmill.tasks.score.score_function import load_function
from rollmill.tasks.score.scorer import CandidateText
from rollmill.tasks.score.verdict import call_scorer
from rollmill.tasks.user_code.worker_main import Handler, serve

ScorerCall: TypeAlias = tuple[int, Sequence[CandidateText]]
"""A scorer's number among those of the worker, and its candidates: one, or those of a group."""


def create_score_handler(start: bytes) -> Handler:
    """Import scorers and warm them up; returns the function that scores the candidates of one call.

    The function takes a pickled ScorerCall and returns a pickled list of ScoreVerdict. `start` is the first request.
    """
    scorers, settings = pickle.loads(start)

    def load_config() -> object:
        # Imported for a scorer with `from_config` alone, because that is slow.
        return import_module("rollmill.tasks.score.config").ScoreConfig.model_validate_json(settings)

    functions = [load_function(path, load_config, args) for path, args in scorers]
    for function in functions:
        if warm := getattr(function.owner, "warm", None):
            warm()

    def score(body: bytes) -> bytes:
        call: ScorerCall = pickle.loads(body)
        function, texts = functions[call[0]], call[1]

        def call_function() -> object:
            candidates = [text.parse() for text in texts]
            return function.call(candidates if function.by_group else candidates[0])

        return pickle.dumps(call_scorer(len(texts), function.by_group, call_function))

    return score


if __name__ == "__main__":
    serve(create_score_handler)
