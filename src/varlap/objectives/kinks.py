"""The warning about piecewise-linear activations, which have no second derivative (paper, section 4.3)."""

import weakref

from varlap.errors import warn
from varlap.models import find_kinks
from varlap.objectives.objective import Context, Objective, prepared
from varlap.posterior.bnn import BNN

_inspected: "weakref.WeakSet[BNN]" = weakref.WeakSet()


def warn_about_kinks(objective: Objective, context: Context) -> None:
    """Look at each network once, functional calls included, by a forward pass that leaves no trace."""
    bnn = context.bnn
    if bnn in _inspected:
        return
    with prepared(context), bnn.buffers_restored():
        kinks = find_kinks(bnn.network, lambda: bnn.outputs(context.batch.x))
    _inspected.add(bnn)  # only now: a batch that does not fit must not swallow the warning
    if kinks:
        places = ", ".join(f"{kink.kind} at {kink.where}" for kink in kinks[:8])
        more = f" and {len(kinks) - 8} more" if len(kinks) > 8 else ""
        warn(
            f"{type(objective).__name__} needs second derivatives, and the network has activations without one: "
            f"{places}{more}. The means' gradient then loses the activations' curvature (variances are unaffected). "
            "Swap modules by network = varlap.smooth(network); write functional calls as F.silu, F.gelu or F.softplus"
        )
