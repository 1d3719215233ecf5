"""Large dense layers, which oneDNN computes if it is faster, give the same sums."""

import pytest
import torch

from pipeline.nets import layers
from pipeline.nets.fast.pairs import paired_linear
from pipeline.nets.layers import dense


@pytest.fixture
def calls(monkeypatch):
    """Return shapes of convolutions that replace products, on a processor where they are faster."""
    monkeypatch.setattr(layers, "_is_onednn_faster", lambda: True)
    calls = []
    convolve = torch.nn.functional.conv2d

    def counted(*args, **kwargs):
        calls.append(args[0].shape)
        return convolve(*args, **kwargs)

    monkeypatch.setattr(torch.nn.functional, "conv2d", counted)
    return calls


def drawn(*shape):
    return torch.randn(shape, generator=torch.Generator().manual_seed(len(shape)))


def results(function, *inputs):
    inputs = [value.clone().requires_grad_() for value in inputs]
    y = function(*inputs)
    return [y, *torch.autograd.grad((y * y).sum(), inputs)]


@pytest.mark.parametrize("rows", [(733,), (3, 251)])
def test_products_and_derivatives_computed_by_onednn_equal_the_results_of_torch(calls, rows):
    inputs = drawn(*rows, 96), drawn(128, 96), drawn(128)
    expected = results(torch.nn.functional.linear, *inputs)
    assert not calls
    for plain, fast in zip(expected, results(dense, *inputs), strict=True):
        torch.testing.assert_close(plain, fast, rtol=1e-4, atol=1e-2)  # sums of up to 753 squares
    assert len(calls) == 1


def test_onednn_compiles_few_shapes_because_numbers_of_rows_are_rounded_up(calls):
    for n_rows in range(700, 1300, 7):
        dense(drawn(n_rows, 96), drawn(128, 96), drawn(128))
    assert len({tuple(shape) for shape in calls}) == 4  # up to 768, 1024, 1280, 1536
    token = layers.IS_TRACED.set(True)
    dense(drawn(733, 96), drawn(128, 96), drawn(128))
    layers.IS_TRACED.reset(token)
    assert calls[-1][2] == 733


def test_pairs_of_large_dense_layers_computed_together_equal_separate_dense_layers(calls):
    shared = drawn(700, 96).expand(2, 700, 96)
    inputs = shared, drawn(2, 128, 96), drawn(2, 128)
    outputs = results(paired_linear, *inputs)
    assert len(calls) == 2
    for k in range(2):
        expected = torch.nn.functional.linear(*(values[k] for values in inputs))
        torch.testing.assert_close(outputs[0][k], expected, rtol=1e-4, atol=1e-4)


def test_derivatives_of_a_gradient_penalty_computed_by_onednn_equal_the_derivatives_of_torch(calls):
    """GAIL's discriminator has a gradient penalty, so the convolution is differentiated twice."""

    def penalty(layer, x, weight, bias):
        (slope,) = torch.autograd.grad(layer(x, weight, bias).tanh().sum(), x, create_graph=True)
        return (slope.norm(dim=-1) - 1.0).square().mean()

    inputs = drawn(600, 96), drawn(128, 96) * 0.1, drawn(128)
    expected = results(lambda *values: penalty(torch.nn.functional.linear, *values), *inputs)
    actual = results(lambda *values: penalty(dense, *values), *inputs)
    assert calls
    for plain, fast in zip(expected, actual, strict=True):
        torch.testing.assert_close(plain, fast, rtol=1e-3, atol=1e-6)


def test_float64_products_are_computed_by_torch_without_onednn(calls):
    dense(drawn(900, 96).double(), drawn(128, 96).double(), drawn(128).double())
    assert not calls


@pytest.mark.parametrize(
    ("rows", "n_in", "n_out"), [(64, 128, 128), (9000, 8, 128), (9000, 512, 2)]
)
def test_small_and_narrow_layers_are_computed_without_onednn(calls, rows, n_in, n_out):
    dense(drawn(rows, n_in), drawn(n_out, n_in), drawn(n_out))
    assert not calls


@pytest.mark.parametrize(
    ("kernels", "processor", "faster"),
    [
        ("AVX512", "x86_64 AMD EPYC 9005 26 2", True),
        ("AVX512", "x86_64 Intel(R) Xeon(R)", False),
        ("AVX2", "x86_64 AMD EPYC 7003 25 1", False),
        ("DEFAULT", "x86_64 AMD EPYC 9005 26 2", False),  # a portable run
    ],
)
def test_onednn_is_used_only_on_amd_processors_with_avx512_kernels(
    monkeypatch, kernels, processor, faster
):
    monkeypatch.setattr(torch.backends.cpu, "get_cpu_capability", lambda: kernels)
    monkeypatch.setattr(layers.machine, "processor", lambda: processor)
    layers._is_onednn_faster.cache_clear()
    assert layers._is_onednn_faster() == (faster and torch.backends.mkldnn.is_available())
    layers._is_onednn_faster.cache_clear()
