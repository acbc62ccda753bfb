"""A task is told by a few words and numbers, and made again from them."""

import json

import pytest
import torch

from varlap.data import Normaliser, load
from varlap.errors import ConfigError
from varlap.experiments import ImageTask


def test_a_task_that_was_written_down_is_made_again():
    task = ImageTask("digits", validation=0.25, seed=3)
    again = ImageTask.described(json.loads(json.dumps(task.describe())))
    for name in ("training", "held_out", "test"):
        for mine, other in zip(getattr(task, name), getattr(again, name), strict=True):
            assert torch.equal(mine, other)
    assert [p.shape for p in again.network().parameters()] == [p.shape for p in task.network().parameters()]


def test_training_and_held_out_images_are_all_and_share_none():
    task = ImageTask("digits", validation=0.25)
    digits = load("digits")
    everything = Normaliser.of(digits.train_images)(digits.train_images)
    parts = torch.cat([task.training[0], task.held_out[0]])
    assert len(task.held_out[1]) == round(0.25 * 1437) == 1437 - len(task.training[1])
    assert torch.equal(parts.flatten(1).unique(dim=0), everything.flatten(1).unique(dim=0))
    assert ImageTask("digits").held_out is None


def test_another_seed_holds_other_images_out():
    assert not torch.equal(
        ImageTask("digits", validation=0.1).held_out[0], ImageTask("digits", validation=0.1, seed=1).held_out[0]
    )


def test_what_is_wrong_is_named():
    with pytest.raises(ConfigError, match="unknown model 'vgg'; choose one of auto, preact-resnet-18, convnet, mlp"):
        ImageTask("digits", "vgg")
    with pytest.raises(
        ConfigError, match=r"validation = 0.0003 of 1437 images of digits is none; hold out more, such as"
    ):
        _ = ImageTask("digits", validation=0.0003).training
    with pytest.raises(ConfigError, match=r"--validation 1.0 leaves no training images; hold out less"):
        _ = ImageTask("digits", validation=1.0).training
