"""Digits: the same network trained by MAP and by VL, and the calibration of its probabilities.

`python examples/tutorials/digits.py` draws its picture into the current folder.
"""

# --8<-- [start:data]
import matplotlib.pyplot as plt
import torch

import varlap

digits = varlap.data.load("digits")
images = digits.train_images.flatten(1)
train, held_out = (images[:300], digits.train_labels[:300]), (images[300:700], digits.train_labels[300:700])
test = digits.test_images.flatten(1), digits.test_labels
# --8<-- [end:data]


# --8<-- [start:train]
def trained(objective):
    """Train a network from the same start with any objective."""
    torch.manual_seed(0)
    bnn = varlap.BNN(varlap.models.mlp(64, 10, hidden=(100,)), likelihood="categorical")
    varlap.fit(bnn, objective, train, epochs=80, batch_size=50, lr=1e-2, progress="none")
    return bnn


chosen = {}
for name, method in {"MAP": varlap.MAP, "VL": varlap.VL}.items():
    candidates = {beta: trained(method(num_data=300, beta=beta)) for beta in (0.001, 0.01, 0.1)}
    nll = {beta: varlap.evaluate(bnn, held_out)["nll"] for beta, bnn in candidates.items()}
    best = min(nll, key=nll.get)
    chosen[name] = candidates[best]
    print(f"{name}: held-out NLL", {beta: round(value, 3) for beta, value in nll.items()}, "so beta =", best)
# --8<-- [end:train]

# --8<-- [start:scores]
for name, bnn in chosen.items():
    scores = varlap.evaluate(bnn, test)
    print(name, {score: round(scores[score], 3) for score in ("nll", "accuracy", "ece")})
temperature = varlap.fit_temperature(chosen["MAP"], held_out)
scaled = varlap.evaluate(chosen["MAP"], test, temperature=temperature)
print("MAP, temperature", {score: round(scaled[score], 3) for score in ("nll", "accuracy", "ece")})
# --8<-- [end:scores]

# --8<-- [start:picture]
predictions = {name: bnn.predict(test[0]) for name, bnn in chosen.items()}
figure, (left, right) = plt.subplots(1, 2, figsize=(8, 3.6), layout="constrained")
varlap.plot.reliability(predictions, test[1], bins=10, ax=left)
varlap.plot.risk_coverage(predictions, test[1], ax=right)
figure.savefig("digits.png", dpi=110)
# --8<-- [end:picture]
