"""Trains the network behind `quantsieve demo` and writes its two files; run by hand, never by the product.

    pip install torch==2.13.0 scikit-learn onnx     # made with scikit-learn 1.9.1, onnx 1.23.2, numpy 2.4.6
    python scripts/train_demo.py                    # about one minute on one thread

Writes `src/quantsieve/example/model.onnx` and `data.npz`. Seeds are fixed and one thread is used: two runs on
one machine give the same bytes; another processor may round differently and give a slightly different
network.

Data: the 1797 images of `sklearn.datasets.load_digits`, 8x8, values 0..16, enlarged to 16x16 in whole
numbers. The first 297 train (with shifts, rotations, noise), the last 1500 ship: so few train because float
quality must leave room to lose and gain, and because many independent images judge better than copies of a
few. No shipped image is used in training, and none is altered but for its size. They keep their order, in
which writers follow each other: whoever splits them should shuffle.

Network: MobileNetV2-like, 27 weight layers, BatchNorm folded away. While nothing reaches 6, Clip(0, 6) obeys
`clip(s x) = s clip(x)`, so each channel of an inverted residual block has two free scales, s behind the
expansion and u behind the depthwise convolution: rows of the expansion times s, depthwise filters times u /
s, columns of the projection divided by u. MobileNets drift along that freedom while they train, which is why
plain int8 hurts them; one as small as this does not drift far, so `widen` moves a few blocks on purpose. The
float function stays.
"""

import argparse
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import onnx
import torch
from onnx import TensorProto, helper, numpy_helper
from sklearn.datasets import load_digits
from torch import nn
from torch.nn import functional

SEED = 20240
NUM_TRAINING = 297
EPOCHS = 60
BATCH = 32
SIDE = 16
PIXEL_MAX = 16.0  # the digits hold counts of dark pixels in 4x4 cells
STEM = 16
HEAD = 128
# (input channels, expanded channels, output channels, stride) of block1, block2, ...
BLOCKS = (
    (16, 48, 16, 1),
    (16, 64, 24, 2),
    (24, 96, 24, 1),
    (24, 96, 24, 1),
    (24, 96, 40, 2),
    (40, 160, 40, 1),
    (40, 160, 40, 1),
    (40, 160, 64, 1),
)
# Chosen by measuring, on the shipped images: blocks without a skip around them, or the first one, hurt most.
# Per tensor the network must fall apart, per channel it must only be hurt, and six float layers (depthwise
# and projection of each) must rescue it. With onnxruntime 1.32: float 95.3 %, per tensor 48.7, per channel
# 94.3, six layers float 95.2.
WIDENED = (1, 2, 5)
# Widest over narrowest channel, behind the expansion and behind the depthwise convolution; the depthwise
# filters get the product. The first decides what per-tensor weights lose, the second what per-channel
# projections lose.
EXPAND_FACTOR = 40.0
DEPTHWISE_FACTOR = 100.0
# Widened channels peak here on the training images: half of the clip, so that other images stay below it,
# too.
WIDEST_PEAK = 3.0


@dataclass(frozen=True, slots=True)
class Layer:
    """A convolution, weight [out, in / groups, k, k], or with stride 0 the classifier, [out, in]; float64."""

    weight: np.ndarray
    bias: np.ndarray
    stride: int = 1
    groups: int = 1
    is_clipped: bool = True


class ConvNorm(nn.Sequential):
    """Convolution without bias, BatchNorm and, unless it is a projection, ReLU6."""

    def __init__(self, inputs: int, outputs: int, kernel: int, stride: int = 1, groups: int = 1, clip: bool = True):
        conv = nn.Conv2d(inputs, outputs, kernel, stride, kernel // 2, groups=groups, bias=False)
        super().__init__(conv, nn.BatchNorm2d(outputs), nn.ReLU6() if clip else nn.Identity())


class InvertedResidual(nn.Module):
    """Expansion, depthwise convolution, linear projection; a residual Add where the shapes allow it."""

    def __init__(self, inputs: int, hidden: int, outputs: int, stride: int):
        super().__init__()
        self.expand = ConvNorm(inputs, hidden, 1)
        self.depthwise = ConvNorm(hidden, hidden, 3, stride, groups=hidden)
        self.project = ConvNorm(hidden, outputs, 1, clip=False)
        self.is_residual = stride == 1 and inputs == outputs

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.project(self.depthwise(self.expand(x)))
        return x + y if self.is_residual else y


class DigitNet(nn.Module):
    """Logits [batch, 10] of images [batch, 1, 16, 16] scaled to 0..1."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = ConvNorm(1, STEM, 3)
        self.blocks = nn.ModuleList(InvertedResidual(*sizes) for sizes in BLOCKS)
        self.head = ConvNorm(BLOCKS[-1][2], HEAD, 1)
        self.classifier = nn.Linear(HEAD, 10)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.stem(x)
        for block in self.blocks:
            x = block(x)
        return self.classifier(self.head(x).mean(dim=(2, 3)))


def digits() -> tuple[np.ndarray, np.ndarray]:
    """All images, float32 [1797, 1, 16, 16] with whole values 0..16, and their labels, int64 [1797]."""
    bunch = load_digits()
    small = torch.from_numpy(bunch.images.astype(np.float32))[:, None]
    large = functional.interpolate(small, size=(SIDE, SIDE), mode="bilinear", align_corners=False)
    return np.rint(large.numpy()).astype(np.float32), bunch.target.astype(np.int64)


def augmented(images: torch.Tensor, source: torch.Generator) -> torch.Tensor:
    """The images, each turned up to 14 degrees, scaled by 0.85..1.15, moved up to 1.6 pixels, with noise."""
    count = len(images)
    angle, zoom, right, down = (torch.rand(4, count, generator=source) * 2 - 1).unbind()
    angle, zoom = angle * 0.25, 1 + 0.15 * zoom
    cos, sin = zoom * torch.cos(angle), zoom * torch.sin(angle)
    rows = torch.stack([cos, -sin, 0.2 * right, sin, cos, 0.2 * down], dim=1)
    grid = functional.affine_grid(rows.reshape(count, 2, 3), list(images.shape), align_corners=False)
    moved = functional.grid_sample(images, grid, align_corners=False)
    return (moved + 0.06 * torch.randn(moved.shape, generator=source)).clamp(0, 1)


def train(images: torch.Tensor, labels: torch.Tensor) -> DigitNet:
    """The trained network in evaluation mode; images scaled to 0..1."""
    torch.manual_seed(SEED)
    source = torch.Generator().manual_seed(SEED)
    net = DigitNet()
    steps = EPOCHS * (len(images) // BATCH)
    optimizer = torch.optim.AdamW(net.parameters(), lr=1e-3, weight_decay=0.01)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=6e-3, total_steps=steps)
    for epoch in range(EPOCHS):
        order = torch.randperm(len(images), generator=source)
        total = 0.0
        for start in range(0, len(images) - BATCH + 1, BATCH):
            chosen = order[start : start + BATCH]
            logits = net(augmented(images[chosen], source))
            loss = functional.cross_entropy(logits, labels[chosen], label_smoothing=0.05)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            schedule.step()
            total += loss.item()
        if epoch % 10 == 9:
            print(f"epoch {epoch + 1}: loss {total / (len(images) // BATCH):.4f}", flush=True)
    return net.eval()


def folded(part: ConvNorm, input_scale: float = 1.0) -> Layer:
    """The convolution with its BatchNorm folded in: W f and beta - mean f, f = gamma / sqrt(v + eps)."""
    conv, norm, activation = part
    weight, gamma, beta, mean, variance = (
        tensor.detach().double().numpy()
        for tensor in (conv.weight, norm.weight, norm.bias, norm.running_mean, norm.running_var)
    )
    factor = gamma / np.sqrt(variance + norm.eps)
    return Layer(
        weight * factor[:, None, None, None] * input_scale,
        beta - mean * factor,
        conv.stride[0],
        conv.groups,
        isinstance(activation, nn.ReLU6),
    )


def layers_of(net: DigitNet) -> dict[str, Layer]:
    """Folded layers by name, in order; the stem takes raw pixels 0..16, so the scaling is folded as well."""
    layers = {"stem": folded(net.stem, 1 / PIXEL_MAX)}
    for number, block in enumerate(net.blocks, 1):
        for role in ("expand", "depthwise", "project"):
            layers[f"block{number}/{role}"] = folded(getattr(block, role))
    layers["head"] = folded(net.head)
    weight, bias = (p.detach().double().numpy() for p in (net.classifier.weight, net.classifier.bias))
    layers["classifier"] = Layer(weight, bias, stride=0, is_clipped=False)
    return layers


def is_residual(block: int) -> bool:
    """Whether block `block` (from 1) ends in an Add."""
    inputs, _, outputs, stride = BLOCKS[block - 1]
    return stride == 1 and inputs == outputs


def run(layers: Mapping[str, Layer], images: np.ndarray) -> tuple[np.ndarray, dict[str, np.ndarray]]:
    """Logits [batch, 10] of raw images, and each convolution's largest value per channel before its Clip."""
    peaks: dict[str, np.ndarray] = {}

    def apply(name: str, x: torch.Tensor) -> torch.Tensor:
        layer = layers[name]
        weight, bias = torch.from_numpy(layer.weight), torch.from_numpy(layer.bias)
        y = functional.conv2d(x, weight, bias, layer.stride, weight.shape[-1] // 2, groups=layer.groups)
        peaks[name] = y.amax(dim=(0, 2, 3)).numpy()
        return y.clamp(0, 6) if layer.is_clipped else y

    x = apply("stem", torch.from_numpy(images.astype(np.float64)))
    for number in range(1, len(BLOCKS) + 1):
        y = x
        for role in ("expand", "depthwise", "project"):
            y = apply(f"block{number}/{role}", y)
        x = x + y if is_residual(number) else y
    pooled = apply("head", x).mean(dim=(2, 3)).numpy()
    return pooled @ layers["classifier"].weight.T + layers["classifier"].bias, peaks


def widen(layers: Mapping[str, Layer], peaks: Mapping[str, np.ndarray]) -> dict[str, Layer]:
    """The same function with uneven channels in the blocks of WIDENED (see the module docstring).

    Channels that come near the clip on the training images, or are never above zero, keep their scale.
    """
    result = dict(layers)
    source = np.random.default_rng(SEED)
    for block in WIDENED:
        expand, depthwise, project = (f"block{block}/{role}" for role in ("expand", "depthwise", "project"))
        before, after = peaks[expand], peaks[depthwise]
        free = (before > 1e-3) & (before < 5.5) & (after > 1e-3) & (after < 5.5)
        place = source.permutation(len(before)) / (len(before) - 1)
        # Opposite order on the two sides, so that the depthwise filters spread further than any activation.
        s = np.where(free, WIDEST_PEAK * EXPAND_FACTOR**-place / np.maximum(before, 1e-3), 1.0)
        u = np.where(free, WIDEST_PEAK * DEPTHWISE_FACTOR ** (place - 1) / np.maximum(after, 1e-3), 1.0)
        result[expand] = rescaled(layers[expand], s[:, None, None, None], s)
        result[depthwise] = rescaled(layers[depthwise], (u / s)[:, None, None, None], u)
        result[project] = rescaled(layers[project], (1 / u)[None, :, None, None], np.ones(1))
        print(f"block{block}: {int(free.sum())} of {len(free)} channels widened")
    return result


def rescaled(layer: Layer, weight: np.ndarray, bias: np.ndarray) -> Layer:
    """The layer with weight and bias multiplied by what broadcasts to their shapes."""
    return Layer(layer.weight * weight, layer.bias * bias, layer.stride, layer.groups, layer.is_clipped)


def graph_parts(layers: Mapping[str, Layer]) -> Iterator[onnx.NodeProto]:
    """The nodes in order; tensors are called after the node that makes them."""

    def conv(name: str, x: str) -> Iterator[onnx.NodeProto]:
        layer = layers[name]
        kernel = layer.weight.shape[-1]
        yield helper.make_node(
            "Conv",
            [x, f"{name}/weight", f"{name}/bias"],
            [f"{name}/conv_out"],
            f"{name}/conv",
            kernel_shape=[kernel, kernel],
            strides=[layer.stride, layer.stride],
            pads=[kernel // 2] * 4,
            group=layer.groups,
        )
        if layer.is_clipped:
            yield helper.make_node("Clip", [f"{name}/conv_out", "zero", "six"], [f"{name}/clip_out"], f"{name}/clip")

    yield from conv("stem", "input")
    x = "stem/clip_out"
    for number in range(1, len(BLOCKS) + 1):
        block = f"block{number}"
        yield from conv(f"{block}/expand", x)
        yield from conv(f"{block}/depthwise", f"{block}/expand/clip_out")
        yield from conv(f"{block}/project", f"{block}/depthwise/clip_out")
        y = f"{block}/project/conv_out"
        if is_residual(number):
            yield helper.make_node("Add", [x, y], [f"{block}/add_out"], f"{block}/add")
            y = f"{block}/add_out"
        x = y
    yield from conv("head", x)
    yield helper.make_node("GlobalAveragePool", ["head/clip_out"], ["pool_out"], "pool")
    yield helper.make_node("Flatten", ["pool_out"], ["flatten_out"], "flatten", axis=1)
    gemm = ["flatten_out", "classifier/weight", "classifier/bias"]
    yield helper.make_node("Gemm", gemm, ["logits"], "classifier/gemm", transB=1)


def onnx_model(layers: Mapping[str, Layer]) -> onnx.ModelProto:
    """The network as ONNX: `input` float32 [batch, 1, 16, 16], raw pixels, to `logits` [batch, 10]."""
    arrays = {"zero": np.float32(0), "six": np.float32(6)}
    for name, layer in layers.items():
        arrays[f"{name}/weight"] = layer.weight.astype(np.float32)
        arrays[f"{name}/bias"] = layer.bias.astype(np.float32)
    graph = helper.make_graph(
        list(graph_parts(layers)),
        "quantsieve_demo",
        [helper.make_tensor_value_info("input", TensorProto.FLOAT, ["batch", 1, SIDE, SIDE])],
        [helper.make_tensor_value_info("logits", TensorProto.FLOAT, ["batch", 10])],
        [numpy_helper.from_array(np.asarray(array), name) for name, array in arrays.items()],
    )
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], producer_name="quantsieve")
    model.ir_version = 8
    helper.set_model_props(
        model,
        {
            "description": "MobileNetV2-like classifier of handwritten digits with uneven channel ranges, "
            "the demo of Quantsieve; written by scripts/train_demo.py. Input: pixels 0..16, 16x16.",
            "data": "Optical Recognition of Handwritten Digits (E. Alpaydin, C. Kaynak, 1998; UCI Machine "
            "Learning Repository, made with preprocessing programs of NIST), as scikit-learn ships it: "
            "load_digits.",
            "data_licence": "public; taken from scikit-learn, which is distributed under BSD-3-Clause.",
        },
    )
    onnx.checker.check_model(model, full_check=True)
    return model


def top1(logits: np.ndarray, labels: np.ndarray) -> float:
    """Share of samples whose largest logit is the label's, in percent."""
    return 100 * float(np.mean(logits.argmax(axis=1) == labels))


def main() -> None:
    """Trains, widens, writes the two files and prints what changed."""
    parser = argparse.ArgumentParser(description="Train the demo network of Quantsieve and write its files.")
    default = Path(__file__).resolve().parents[1] / "src" / "quantsieve" / "example"
    parser.add_argument("--out", type=Path, default=default, help="folder to write to (default: %(default)s)")
    out = parser.parse_args().out
    torch.set_num_threads(1)
    torch.use_deterministic_algorithms(True)
    images, labels = digits()
    train_images = torch.from_numpy(images[:NUM_TRAINING] / np.float32(PIXEL_MAX))
    net = train(train_images, torch.from_numpy(labels[:NUM_TRAINING]))
    plain = layers_of(net)
    source = torch.Generator().manual_seed(SEED)
    seen = [train_images, *(augmented(train_images, source) for _ in range(4))]
    _, peaks = run(plain, torch.cat(seen).numpy() * PIXEL_MAX)
    wide = widen(plain, peaks)
    shipped, answers = images[NUM_TRAINING:], labels[NUM_TRAINING:]
    for title, layers in (("trained", plain), ("widened", wide)):
        print(f"{title}: top-1 {top1(run(layers, shipped)[0], answers):.2f} % on {len(answers)} shipped images")
    out.mkdir(parents=True, exist_ok=True)
    (out / "model.onnx").write_bytes(onnx_model(wide).SerializeToString(deterministic=True))
    np.savez_compressed(out / "data.npz", input=shipped, labels=answers)


if __name__ == "__main__":
    main()
