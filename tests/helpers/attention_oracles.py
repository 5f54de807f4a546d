"""Slow references of the attention methods, and of the transformers that they explain, in float64 with explicit loops.

A ``SlowViT`` is read from the weights of a model of torchvision, timm or Hugging Face. It computes each attention map
row by row as softmax(q k / sqrt(d)), so that gradients with respect to the map exist; autograd takes only those.
"""

from __future__ import annotations

import copy
import math
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

Array = np.ndarray


@dataclass
class SlowAttention:
    """Queries, keys and values of several heads, and the linear layer after them."""

    query: tuple[Tensor, Tensor]
    key: tuple[Tensor, Tensor]
    value: tuple[Tensor, Tensor]
    out: tuple[Tensor, Tensor]
    heads: int

    def __call__(self, queries: Tensor, tokens: Tensor) -> tuple[Tensor, Tensor]:
        """Return the result (queries, C) and the map (heads, queries, tokens)."""
        width = queries.shape[1] // self.heads
        q, k, v = _linear(queries, self.query), _linear(tokens, self.key), _linear(tokens, self.value)
        rows = []
        for head in range(self.heads):
            part = slice(head * width, (head + 1) * width)
            for i in range(len(q)):
                weights = torch.exp((k[:, part] * q[i, part]).sum(1) / width**0.5)
                rows.append(weights / weights.sum())
        attention = torch.stack(rows).reshape(self.heads, len(q), len(k))
        results = []
        for head in range(self.heads):
            part = slice(head * width, (head + 1) * width)
            results.append(attention[head] @ v[:, part])
        return _linear(torch.cat(results, 1), self.out), attention


@dataclass
class SlowBlock:
    """One block: attention and a perceptron of two layers, each after a normalisation and beside a skip connection."""

    norm1: nn.LayerNorm
    attention: SlowAttention
    norm2: nn.LayerNorm
    hidden: tuple[Tensor, Tensor]
    out: tuple[Tensor, Tensor]

    def __call__(self, tokens: Tensor) -> tuple[Tensor, Tensor]:
        normal = _norm(tokens, self.norm1)
        attended, attention = self.attention(normal, normal)
        tokens = tokens + attended
        hidden = _gelu(_linear(_norm(tokens, self.norm2), self.hidden))
        return tokens + _linear(hidden, self.out), attention


@dataclass
class SlowPool:
    """An attention pool of one query, with a perceptron after it."""

    query: Tensor
    attention: SlowAttention
    norm: nn.LayerNorm
    hidden: tuple[Tensor, Tensor]
    out: tuple[Tensor, Tensor]

    def __call__(self, tokens: Tensor) -> tuple[Tensor, Tensor]:
        pooled, attention = self.attention(self.query, tokens)
        pooled = pooled + _linear(_gelu(_linear(_norm(pooled, self.norm), self.hidden)), self.out)
        return pooled[0], attention


@dataclass
class SlowViT:
    """A transformer: what it does to the tokens (tokens, C) of one picture."""

    patches: nn.Conv2d
    prefix: Tensor
    positions: Tensor
    blocks: list[SlowBlock]
    norm: nn.LayerNorm
    head: tuple[Tensor, Tensor]
    averages: bool = False
    pool: SlowPool | None = None

    def embed(self, image: Tensor) -> Tensor:
        size = self.patches.kernel_size[0]
        kernel, bias = self.patches.weight.flatten(1), self.patches.bias
        cells = []
        for y in range(0, image.shape[1], size):
            for x in range(0, image.shape[2], size):
                cells.append(kernel @ image[:, y : y + size, x : x + size].flatten() + bias)
        return torch.cat([self.prefix, torch.stack(cells)]) + self.positions

    def score(self, tokens: Tensor, target: int) -> Tensor:
        """Return the logit of a class from the last tokens."""
        pooled = tokens[len(self.prefix) :].mean(0) if self.averages else tokens[0]
        return _linear(_norm(pooled, self.norm), self.head)[target]

    def maps_and_gradients(self, image: Tensor, target: int) -> tuple[list[Array], list[Array]]:
        """Return the attention map of each layer (heads, queries, keys), and the gradient of the score."""
        tokens, maps = self.embed(image.double()), []
        for block in self.blocks:
            tokens, attention = block(tokens)
            maps.append(attention)
        if self.pool is None:
            score = self.score(tokens, target)
        else:
            pooled, attention = self.pool(_norm(tokens, self.norm))
            maps.append(attention)
            score = _linear(pooled, self.head)[target]
        gradients = torch.autograd.grad(score, maps)
        return [each.detach().numpy() for each in maps], [each.numpy() for each in gradients]

    def legrad(self, image: Tensor, target: int) -> Array:
        """LeGrad, Bousselham et al. 2024: for each layer l, S_l = head(norm(mean of Z_l)), positive dS_l / dA_l.

        The mean is that of all tokens, the class token included, as in the authors' code. With an attention pool, the
        pool reads Z_l, and the gradient is that with respect to its map.
        """
        tokens, total = self.embed(image.double()), np.zeros(1)
        for block in self.blocks:
            tokens, attention = block(tokens.detach())
            if self.pool is None:
                score = _linear(_norm(tokens.mean(0), self.norm), self.head)[target]
            else:
                pooled, attention = self.pool(_norm(tokens, self.norm))
                score = _linear(pooled, self.head)[target]
            (gradient,) = torch.autograd.grad(score, attention)
            relevance = np.zeros(attention.shape[2])
            for head in gradient.numpy():
                for row in head:
                    relevance += np.maximum(row, 0) / (attention.shape[0] * attention.shape[1])
            total = total + relevance / len(self.blocks)
        return total


def _linear(values: Tensor, weights: tuple[Tensor, Tensor]) -> Tensor:
    return values @ weights[0].T + weights[1]


def _gelu(values: Tensor) -> Tensor:
    return values * (1 + torch.erf(values / math.sqrt(2))) / 2


def _norm(values: Tensor, norm: nn.LayerNorm) -> Tensor:
    centred = values - values.mean(-1, keepdim=True)
    deviation = (centred.square().mean(-1, keepdim=True) + norm.eps).sqrt()
    return centred / deviation * norm.weight + norm.bias


def _of(linear: Any) -> tuple[Tensor, Tensor]:
    return linear.weight, linear.bias


def _packed(weight: Tensor, bias: Tensor, out: Any, heads: int) -> SlowAttention:
    parts = list(zip(weight.chunk(3), bias.chunk(3), strict=True))
    return SlowAttention(parts[0], parts[1], parts[2], _of(out), heads)


def from_torchvision(model: Any) -> SlowViT:
    model = copy.deepcopy(model).double()
    blocks = [
        SlowBlock(
            block.ln_1,
            _packed(
                block.self_attention.in_proj_weight,
                block.self_attention.in_proj_bias,
                block.self_attention.out_proj,
                block.self_attention.num_heads,
            ),
            block.ln_2,
            _of(block.mlp[0]),
            _of(block.mlp[3]),
        )
        for block in model.encoder.layers
    ]
    head = _of(model.heads.head)
    return SlowViT(
        model.conv_proj, model.class_token[0], model.encoder.pos_embedding[0], blocks, model.encoder.ln, head
    )


def from_timm(model: Any) -> SlowViT:
    model = copy.deepcopy(model).double()
    blocks = [
        SlowBlock(
            block.norm1,
            _packed(block.attn.qkv.weight, block.attn.qkv.bias, block.attn.proj, block.attn.num_heads),
            block.norm2,
            _of(block.mlp.fc1),
            _of(block.mlp.fc2),
        )
        for block in model.blocks
    ]
    pool = None
    if model.attn_pool is not None:
        made = model.attn_pool
        key, value = zip(made.kv.weight.chunk(2), made.kv.bias.chunk(2), strict=True)
        attention = SlowAttention(_of(made.q), key, value, _of(made.proj), made.num_heads)
        pool = SlowPool(made.latent[0], attention, made.norm, _of(made.mlp.fc1), _of(made.mlp.fc2))
    averages = model.global_pool == "avg"
    width = model.embed_dim
    prefix = torch.zeros(0, width).double() if model.cls_token is None else model.cls_token[0]
    norm = model.fc_norm if averages else model.norm
    return SlowViT(
        model.patch_embed.proj, prefix, model.pos_embed[0], blocks, norm, _of(model.head), averages=averages, pool=pool
    )


def from_huggingface(model: Any) -> SlowViT:
    model = copy.deepcopy(model).double()
    heads = model.config.num_attention_heads
    blocks = []
    for layer in model.vit.layers:
        inner = layer.attention
        attention = SlowAttention(_of(inner.q_proj), _of(inner.k_proj), _of(inner.v_proj), _of(inner.o_proj), heads)
        blocks.append(
            SlowBlock(layer.layernorm_before, attention, layer.layernorm_after, _of(layer.mlp.fc1), _of(layer.mlp.fc2))
        )
    parts = model.vit.embeddings
    return SlowViT(
        parts.patch_embeddings.projection,
        parts.cls_token[0],
        parts.position_embeddings[0],
        blocks,
        model.vit.layernorm,
        _of(model.classifier),
    )


# --- the methods, for one picture: the maps of the layers (heads, queries, keys), and the rows that the head reads


def rollout(maps: list[Array], gradients: list[Array], rows: Array) -> Array:
    """Attention rollout, Abnar and Zuidema 2020, section 4: A = 0.5 W + 0.5 I, multiplied layer by layer."""
    fused = [_mean_over_heads(layer) for layer in maps]
    return _product([0.5 * layer if _is_square(layer) else layer for layer in fused], [0.5] * len(fused), rows)


def gradrollout(maps: list[Array], gradients: list[Array], rows: Array) -> Array:
    """Gradient attention rollout, Gildenblat 2020: ReLU of the mean of A G over heads, plus I, rows divided by sums."""
    mixes, kept = [], []
    for layer, gradient in zip(maps, gradients, strict=True):
        fused = np.maximum(_mean_over_heads(layer * gradient), 0)
        sums = np.array([1 + row.sum() for row in fused])
        mixes.append(np.stack([row / total for row, total in zip(fused, sums, strict=True)]))
        kept.append(1 / sums)
    return _product(mixes, kept, rows)


def chefer(maps: list[Array], gradients: list[Array], rows: Array) -> Array:
    """Generic relevance, Chefer et al. 2021, Eq. 5: A' = E_h((G A)^+), Eq. 6: R = R + A' R, from R = I."""
    mixes = [_mean_over_heads(np.maximum(layer * g, 0)) for layer, g in zip(maps, gradients, strict=True)]
    return _product(mixes, [1.0] * len(mixes), rows)


def _mean_over_heads(layer: Array) -> Array:
    total = np.zeros(layer.shape[1:])
    for head in layer:
        total += head
    return total / len(layer)


def _is_square(layer: Array) -> bool:
    return layer.shape[0] == layer.shape[1]


def _product(mixes: list[Array], kept: list[Any], rows: Array) -> Array:
    """Multiply all layers, each the sum of its attention and its skip connection, and read the given rows.

    What passes skip connections alone is subtracted, unless an attention pool follows.
    """
    tokens = mixes[0].shape[1]
    relevance, skipped = np.eye(tokens), np.eye(tokens)
    for mix, keep in zip(mixes, kept, strict=True):
        if _is_square(mix):
            connection = np.diag(np.full(tokens, keep) if np.isscalar(keep) else keep)
            relevance, skipped = (mix + connection) @ relevance, connection @ skipped
        else:
            relevance, skipped = mix @ relevance, np.zeros((len(mix), tokens))
    return rows @ (relevance - skipped)


FORMULAS = {"rollout": rollout, "gradrollout": gradrollout, "chefer": chefer}
ORACLES = {*FORMULAS, "legrad"}
"""The methods that have a slow reference; that of LeGrad is ``SlowViT.legrad``."""
