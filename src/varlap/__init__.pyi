# The public names as type checkers and the documentation see them; `__init__.py` finds the same when they are used.
from varlap import data as data, errors as errors, metrics as metrics, models as models, plot as plot, report as report
from varlap.curvature import (
    Curvature as Curvature,
    EmpiricalFisher as EmpiricalFisher,
    ExactFisher as ExactFisher,
    Fisher as Fisher,
    Hessian as Hessian,
    fisher_diagonal as fisher_diagonal,
    hessian_diagonal as hessian_diagonal,
)
from varlap.integrations.scikit_learn import (
    VLClassifier as VLClassifier,
    VLRegressor as VLRegressor,
)
from varlap.likelihoods import (
    Bernoulli as Bernoulli,
    Categorical as Categorical,
    Gaussian as Gaussian,
    Heteroscedastic as Heteroscedastic,
    Likelihood as Likelihood,
    Poisson as Poisson,
    Prediction as Prediction,
)
from varlap.metrics import evaluate as evaluate
from varlap.models import (
    find_kinks as find_kinks,
    smooth as smooth,
)
from varlap.objectives import (
    MAP as MAP,
    VI as VI,
    VL as VL,
    Terms as Terms,
    UnboundedVariances as UnboundedVariances,
    VLDeterminant as VLDeterminant,
    VLHessian as VLHessian,
    unbounded_variances as unbounded_variances,
)
from varlap.posterior import (
    BNN as BNN,
    EmpiricalBayesPrior as EmpiricalBayesPrior,
    FanInPrior as FanInPrior,
    OneScalePrior as OneScalePrior,
    Prior as Prior,
    Weight as Weight,
)
from varlap.posthoc import (
    VarianceGap as VarianceGap,
    fit_temperature as fit_temperature,
    laplace as laplace,
    variance_gap as variance_gap,
)
from varlap.predict import reestimate_statistics as reestimate_statistics
from varlap.training import (
    FitSettings as FitSettings,
    History as History,
    TrainingStep as TrainingStep,
    adam as adam,
    fit as fit,
    load as load,
    sgd as sgd,
)

__version__: str
__all__: list[str]
