"""Images from elsewhere have the form of the test images, and are what they are called."""

import pytest
import torch

from varlap.data import ArrayData, load
from varlap.errors import ConfigError
from varlap.experiments import outside
from varlap.experiments.outside import letters


def test_letters_are_the_same_each_time_and_differ_among_themselves():
    like = torch.zeros(1, 1, 8, 8)
    images = letters(24, like)
    assert torch.equal(images, letters(24, like))
    assert not torch.equal(images, letters(24, like, seed=1))
    assert len(images.unique(dim=0)) == 24
    assert images.min() == 0
    assert 0.5 < images.amax((1, 2, 3)).min() <= images.max() <= 1


def test_an_upright_letter_is_recognised():
    t = letters(36, torch.zeros(1, 1, 28, 28))[9::12].mean(0)[0]  # the tenth of twelve is T
    assert t[:10, 4:24].mean() > t[18:, 4:24].mean()  # its bar is above
    assert t[18:24, 12:16].mean() > 3 * t[18:24, 4:9].mean()  # and a stem in the middle below


def test_letters_follow_size_channels_and_range_of_the_images():
    images = letters(5, torch.zeros(1, 3, 32, 32, dtype=torch.uint8))
    assert images.shape == (5, 3, 32, 32)
    assert images.dtype == torch.uint8
    assert images.max() > 150
    assert torch.equal(images[:, 0], images[:, 2])


def test_rotated_images_are_turned_by_a_quarter():
    digits = load("digits")
    turned = outside("rotated", digits)
    assert torch.equal(turned[:, :, 7 - 5, 2], digits.test_images[:, :, 2, 5])


def test_images_that_cannot_be_turned_are_named():
    images, labels = torch.zeros(2, 1, 4, 6), torch.tensor([0, 1])
    with pytest.raises(ConfigError, match="rotated images of flat would be 6×4, not 4×6"):
        outside("rotated", ArrayData("flat", images, labels, images, labels))
