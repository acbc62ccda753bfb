"""Tables with scikit-learn's interface: regression with standard deviations, and classification.

`python examples/tutorials/tables.py` draws its picture into the current folder.
"""

# --8<-- [start:data]
import matplotlib.pyplot as plt
import numpy as np
from scipy.stats import norm
from sklearn.compose import TransformedTargetRegressor
from sklearn.datasets import load_diabetes, load_iris
from sklearn.model_selection import cross_val_score, train_test_split
from sklearn.neural_network import MLPRegressor
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import StandardScaler

import varlap

X, y = load_diabetes(return_X_y=True)
X, X_test, y, y_test = train_test_split(X, y, test_size=0.4, random_state=0)
# --8<-- [end:data]

# --8<-- [start:fit]
model = varlap.VLRegressor(epochs=400, random_state=0).fit(X, y)
mean, std = model.predict(X_test, return_std=True)
print(f"VL: RMSE {np.sqrt(np.mean((y_test - mean) ** 2)):.0f}, std from {std.min():.0f} to {std.max():.0f}")
# --8<-- [end:fit]

# --8<-- [start:mlp]
inner = make_pipeline(StandardScaler(), MLPRegressor(early_stopping=True, random_state=0))
mlp = TransformedTargetRegressor(inner, transformer=StandardScaler()).fit(X, y)
mlp_mean = mlp.predict(X_test)
mlp_std = np.sqrt(np.mean((y - mlp.predict(X)) ** 2))
print(f"MLP: RMSE {np.sqrt(np.mean((y_test - mlp_mean) ** 2)):.0f}, std {mlp_std:.0f}")
# --8<-- [end:mlp]

# --8<-- [start:inside]
levels = np.linspace(0.05, 0.95, 19)
half_widths = norm.ppf(0.5 + levels / 2)
inside = [np.mean(np.abs(y_test - mean) < width * std) for width in half_widths]
mlp_inside = [np.mean(np.abs(y_test - mlp_mean) < width * mlp_std) for width in half_widths]
print(f"in the 90 % interval: VL {inside[-2]:.2f}, MLP {mlp_inside[-2]:.2f}")
# --8<-- [end:inside]

# --8<-- [start:picture]
figure, (left, right) = plt.subplots(1, 2, figsize=(8, 3.4), layout="constrained")
order = np.argsort(std)
left.plot(std[order], np.abs(y_test - mean)[order], ".", markersize=4, label="a patient")
fifths = np.array_split(order, 5)
rmses = [np.sqrt(np.mean((y_test - mean)[fifth] ** 2)) for fifth in fifths]
left.plot([std[fifth].mean() for fifth in fifths], rmses, "o-", label="root mean square of a fifth")
left.plot([std.min(), std.max()], [std.min(), std.max()], "k:", label="as announced")
left.set(xlabel="standard deviation that VL gives", ylabel="error")
left.legend(frameon=False, fontsize="small")
right.plot([0, 1], [0, 1], "k:")
right.plot(levels, inside, label="VLRegressor")
right.plot(levels, mlp_inside, label="MLPRegressor")
right.set(xlabel="level of the interval", ylabel="part of test rows inside")
right.legend(frameon=False, fontsize="small")
figure.savefig("tables.png", dpi=110)
# --8<-- [end:picture]

# --8<-- [start:classes]
flowers, species = load_iris(return_X_y=True)
classifier = varlap.VLClassifier(random_state=0)
print(f"iris: log-loss {-cross_val_score(classifier, flowers, species, scoring='neg_log_loss').mean():.2f}")
# --8<-- [end:classes]
