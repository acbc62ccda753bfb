"""The user's own loop takes the compiled path too, once its steps repeat."""

import collections
import logging
from collections.abc import Hashable
from typing import Any

import torch
from torch import Tensor

from varlap import tree
from varlap.curvature.protocol import check_targets
from varlap.objectives.compiled import MAX_GRAPHS, Compiled
from varlap.objectives.objective import Context, Evaluation, Objective
from varlap.objectives.situation import is_ready, kept_alive, runs_own_code, shape_of, situation
from varlap.objectives.terms import scaled
from varlap.predict.mean import probed_outputs

log = logging.getLogger(__name__)

CALLS_BEFORE_COMPILING = 50  # at some 80 ms each, before the compiler's minute


class Automatic:
    """Compiles an objective's evaluation after enough calls of one kind, and hands out its values and gradients.

    Whatever is not sure to be the same when compiled stays eager: networks with hooks, inputs that want a gradient, a
    network that changes from call to call.
    """

    def __init__(self, calls_before: int = CALLS_BEFORE_COMPILING) -> None:
        self.calls_before = calls_before
        self._calls: collections.Counter[int] = collections.Counter()
        self._graphs: dict[Hashable, tuple[Compiled, Any, list[Any]]] = {}
        self._off = False

    def evaluation(self, objective: Objective, context: Context) -> Evaluation | None:
        """Evaluate by a compiled graph, or return None where that is not to be."""
        if self._off or not _can_repeat(objective, context):
            return None
        batch = context.batch
        key = situation(objective, context.bnn, context.streams.step), shape_of(batch.x, batch.y, batch.weights)
        if key not in self._graphs and not self._compile(key, objective, context):
            return None
        graph, outputs, _ = self._graphs[key]
        check_targets(context.bnn, outputs, batch.y, batch.size)
        log_likelihood, curvature, kl, sound = graph(context)
        copies = scaled(
            list(graph.gradients.values()), torch.ones((), device=sound.device)
        )  # the next call writes there
        gradients = dict(zip(graph.gradients, copies, strict=True))
        return Evaluation(log_likelihood, curvature, kl, gradients, None, [], sound)

    def _compile(self, key: Hashable, objective: Objective, context: Context) -> bool:
        self._calls[hash(key)] += 1
        if self._calls[hash(key)] <= self.calls_before:
            if len(self._calls) > self.calls_before + MAX_GRAPHS:  # something changes in every call
                self._off = True
            return False
        if len(self._graphs) == MAX_GRAPHS:
            return False
        log.info("compiling the evaluation of %s for batches of this shape", type(objective).__name__)
        try:
            bnn = context.bnn
            outputs = probed_outputs(bnn, context.batch.x)  # what targets must fit
            graph = Compiled(objective, context, pool=self._pool())
            self._graphs[key] = graph, outputs, kept_alive(objective, bnn)
        except Exception as error:
            log.warning("evaluations stay eager, since they cannot be compiled: %s", str(error).split("\n")[0])
            self._off = True
            return False
        finally:
            torch.clear_autocast_cache()  # it may hold what was traced
        return True

    def _pool(self) -> Tensor | None:
        return next((graph.pool for graph, *_ in self._graphs.values()), None)


def _can_repeat(objective: Objective, context: Context) -> bool:
    return (
        context.with_gradients
        and is_ready(objective)
        and not any(tensor.requires_grad for tensor in tree.tensors(context.batch.x))
        and not runs_own_code(context.bnn)
        and not torch.compiler.is_compiling()
        and not (context.bnn.device.type == "cuda" and torch.cuda.is_current_stream_capturing())
    )
