"""Claims about how the scikit-learn estimators choose β by cross-validation."""

import numpy as np
import pytest
from sklearn.datasets import load_iris
from sklearn.model_selection import KFold, StratifiedKFold, cross_val_score

import varlap
from varlap.errors import ConfigError
from varlap.integrations.scikit_learn import base, sizing

X_IRIS, Y_IRIS = load_iris(return_X_y=True)
FEW = {"hidden": (4,), "epochs": 5, "random_state": 0}


@pytest.mark.parametrize("kind", [varlap.VLClassifier, varlap.VLRegressor])
def test_beta_is_chosen_by_the_likelihood_of_held_out_rows(kind):
    folds = KFold(2, shuffle=True, random_state=0)
    model = kind(beta=[0.1, 1e4], cv=folds, hidden=(4,), epochs=30, lr=0.05, random_state=0).fit(X_IRIS, Y_IRIS)
    assert model.beta_ == 0.1
    assert model.beta_scores_[0.1] < model.beta_scores_[1e4]


def test_score_of_a_beta_is_the_mean_log_loss_over_folds():
    model = varlap.VLClassifier(beta=[0.1], cv=3, **FEW).fit(X_IRIS, Y_IRIS)
    by_hand = varlap.VLClassifier(beta=0.1, **FEW | {"random_state": model._seed})
    scores = cross_val_score(by_hand, X_IRIS, Y_IRIS, scoring="neg_log_loss", cv=StratifiedKFold(3))
    assert model.beta_scores_[0.1] == pytest.approx(-scores.mean())


def test_cv_is_a_list_of_betas(monkeypatch):
    monkeypatch.setattr("varlap.integrations.scikit_learn.base.BETAS", (0.1, 1.0))
    model = varlap.VLClassifier(beta="cv", cv=2, **FEW).fit(X_IRIS, Y_IRIS)
    assert list(model.beta_scores_) == [0.1, 1.0]
    assert model.beta_ in (0.1, 1.0)


def sizes_of_all_fits(model, X, y, monkeypatch) -> list[tuple]:
    """The network, the prior and the plan of each fit, folds first."""
    seen, train = [], type(model)._train

    def watched(self, *args, **named):
        layers = tuple(p.shape[0] for p in self.network_.parameters() if p.ndim == 2)
        seen.append((layers, type(self.bnn_.prior), self._plan.curvature, self._plan.dtype, self._plan.lr))
        return train(self, *args, **named)

    monkeypatch.setattr(type(model), "_train", watched)
    model.fit(X, y)
    return seen


@pytest.mark.parametrize(
    ("kind", "num_rows", "num_features", "hidden"),
    [
        (varlap.VLClassifier, 1100, 2, (100, 2)),  # folds of 825 rows would have 50 units
        (varlap.VLRegressor, 2100, 2, (50, 50, 1)),  # and of 1,575 one layer, with a prior that is learnt
        (varlap.VLRegressor, 1300, 40, (50, 1)),  # and of 975 all rows in every step
    ],
)
def test_beta_is_tuned_with_the_model_of_the_whole_table(kind, num_rows, num_features, hidden, monkeypatch):
    X = np.random.default_rng(0).normal(size=(num_rows, num_features))
    y = X[:, 0] > 0 if kind is varlap.VLClassifier else X[:, 0]
    named = {"noise": "constant"} if kind is varlap.VLRegressor else {}
    model = kind(beta=[0.1], cv=4, epochs=1, random_state=0, **named)
    sizes = sizes_of_all_fits(model, X, y, monkeypatch)
    assert len(sizes) == 5
    assert sizes[-1][0] == hidden
    assert len(set(sizes)) == 1


def test_cross_validation_that_fails_leaves_the_earlier_fit_as_it_was():
    model = varlap.VLClassifier(**FEW).fit(X_IRIS, Y_IRIS)
    before = model.predict_proba(X_IRIS)
    with pytest.raises(ValueError, match="n_splits"):
        model.set_params(beta="cv", cv=51).fit(X_IRIS, Y_IRIS)
    np.testing.assert_array_equal(model.predict_proba(X_IRIS), before)


@pytest.mark.parametrize("sizes", [sizing.CLASSES, sizing.NUMBERS])
def test_the_default_betas_are_among_those_that_cv_chooses_from(sizes):
    assert {sizes.of(rows).beta for rows in (100, 5_000, 50_000)} <= set(base.BETAS)


@pytest.mark.parametrize("kind", [varlap.VLClassifier, varlap.VLRegressor])
def test_the_betas_of_cv_are_those_documented(kind):
    words = ", ".join(f"{beta:g}" for beta in base.BETAS[:-1]) + f" and {base.BETAS[-1]:g}"
    assert f'"cv" chooses among {words} by' in " ".join(kind.__doc__.split())


def test_beta_that_is_no_choice_is_refused():
    for beta in ("cvv", []):
        with pytest.raises(ConfigError, match=r"give a number, 'cv', or the numbers that cross-validation chooses"):
            varlap.VLClassifier(beta=beta, **FEW).fit(X_IRIS, Y_IRIS)
    with pytest.raises(ConfigError, match=r"partial_fit sees too little to choose beta='cv'; give a number"):
        varlap.VLClassifier(beta="cv").partial_fit(X_IRIS, Y_IRIS)
