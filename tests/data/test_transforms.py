"""Claims about Normaliser and crop_and_flip."""

import pytest
import torch
from torch.nn.functional import pad

from varlap.data import Normaliser, crop_and_flip, transforms
from varlap.errors import BatchError, ConfigError, DataError


def generator(seed=0):
    return torch.Generator().manual_seed(seed)


def crop_and_flip_by_loop(images, generator, padding, flip):
    """The slow oracle: one image at a time, the random numbers in the same order."""
    top, left = torch.randint(2 * padding + 1, (2, len(images)), generator=generator)
    flips = torch.randint(2, (len(images),), generator=generator) if flip else torch.zeros(len(images))
    height, width = images.shape[-2:]
    out = []
    for image, row, column, mirrored in zip(images, top, left, flips, strict=True):
        crop = pad(image, [padding] * 4)[:, row : row + height, column : column + width]
        out.append(crop.flip(-1) if mirrored else crop)
    return torch.stack(out)


@pytest.mark.parametrize("flip", [True, False])
@pytest.mark.parametrize("padding", [0, 1, 4])
@pytest.mark.parametrize("dtype", [torch.uint8, torch.float32])
def test_crop_and_flip_equals_a_loop_over_images(dtype, padding, flip):
    images = torch.randint(0, 256, (50, 3, 7, 6), generator=generator(1)).to(dtype)
    expected = crop_and_flip_by_loop(images, generator(), padding, flip)
    result = crop_and_flip(images, generator(), padding=padding, flip=flip)
    assert result.dtype == dtype
    assert torch.equal(result, expected)


def test_every_offset_and_both_directions_occur():
    image = torch.arange(1, 10).reshape(1, 1, 3, 3).expand(500, 1, 3, 3)
    assert len(crop_and_flip(image, generator(), padding=1).unique(dim=0)) == 9 * 2


def test_crop_and_flip_leaves_the_global_generator_alone():
    before = torch.get_rng_state()
    crop_and_flip(torch.zeros(3, 1, 4, 4), generator())
    assert torch.equal(torch.get_rng_state(), before)


def test_crop_and_flip_leaves_its_input_alone_and_repeats_for_a_seed():
    images = torch.rand(5, 1, 4, 4, generator=generator(1))
    before = images.clone()
    assert torch.equal(crop_and_flip(images, generator()), crop_and_flip(images, generator()))
    assert torch.equal(images, before)


def test_crop_and_flip_without_padding_and_flip_is_the_identity():
    images = torch.rand(5, 1, 4, 4)
    assert torch.equal(crop_and_flip(images, generator(), padding=0, flip=False), images)


def test_crop_and_flip_says_what_it_takes():
    with pytest.raises(BatchError, match=r"crop_and_flip: images have shape \[3, 4, 4\]; give \[N, C, H, W\]"):
        crop_and_flip(torch.zeros(3, 4, 4), generator())
    with pytest.raises(ConfigError, match="crop_and_flip: padding is -1; give a whole number of at least 0"):
        crop_and_flip(torch.zeros(3, 1, 4, 4), generator(), padding=-1)


@pytest.mark.parametrize("dtype", [torch.uint8, torch.float32])
def test_normalised_training_images_have_mean_0_and_variance_1(dtype, monkeypatch):
    monkeypatch.setattr(transforms, "_CHUNK", 7)
    images = torch.randint(0, 256, (50, 3, 6, 5), generator=generator()).to(dtype)
    images[:, 1] //= 4
    result = Normaliser.of(images)(images)
    assert result.dtype == torch.float32
    assert result.shape == images.shape
    torch.testing.assert_close(result.mean((0, 2, 3)), torch.zeros(3), atol=1e-5, rtol=0)
    torch.testing.assert_close(result.var((0, 2, 3), correction=0), torch.ones(3), atol=1e-5, rtol=0)


def test_normaliser_has_the_exact_mean_and_standard_deviation():
    images = torch.rand(20, 2, 6, 5, dtype=torch.float64, generator=generator())
    normalise = Normaliser.of(images)
    flat = images.transpose(0, 1).flatten(1)
    torch.testing.assert_close(torch.tensor(normalise.mean, dtype=torch.float64), flat.mean(1))
    torch.testing.assert_close(torch.tensor(normalise.std, dtype=torch.float64), flat.std(1, correction=0))


def test_constant_channel_becomes_zero_not_nan():
    images = torch.full((10, 1, 7, 7), 0.1, dtype=torch.float64)  # its mean is off by a rounding error
    assert Normaliser.of(images).std == (1.0,)
    assert Normaliser.of(images)(images).abs().max() < 1e-6


def test_normaliser_takes_a_single_image():
    assert Normaliser((1.0,), (2.0,))(torch.full((1, 2, 2), 5)).unique().tolist() == [2.0]


def test_normaliser_says_what_it_takes():
    with pytest.raises(BatchError, match=r"Normaliser of 3 channels got images of shape \[2, 1, 4, 4\]; give \[N, 3"):
        Normaliser((0.0,) * 3, (1.0,) * 3)(torch.zeros(2, 1, 4, 4))
    with pytest.raises(BatchError, match=r"Normaliser\.of: images have shape \[2, 4\]; give \[N, C, H, W\]"):
        Normaliser.of(torch.zeros(2, 4))
    with pytest.raises(BatchError, match=r"images of shape \[0, 1, 4, 4\] have no pixels to average"):
        Normaliser.of(torch.zeros(0, 1, 4, 4))
    with pytest.raises(DataError, match="the images hold a NaN or an infinity; remove those images first"):
        Normaliser.of(torch.full((2, 1, 4, 4), float("nan")))
