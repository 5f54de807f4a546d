"""Slow references of the attention methods, and of the transformers that they explain, in float64.

A ``SlowViT`` is read from the weights of a model of torchvision, timm or Hugging Face. It computes each attention map
row by row as softmax(q k / sqrt(d)), so that gradients with respect to the map exist; autograd takes only those.
"""

import copy
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional

Array = np.ndarray
Step = Callable[[Tensor], Tensor]


@dataclass
class SlowAttention:
    """Queries, keys and values of several heads, and the linear layer after them."""

    query: Step
    key: Step
    value: Step
    out: Step
    heads: int

    def __call__(self, queries: Tensor, tokens: Tensor) -> tuple[Tensor, Tensor]:
        """Return the result (queries, C) and the map (heads, queries, tokens)."""
        width = queries.shape[1] // self.heads
        q, k, v = self.query(queries), self.key(tokens), self.value(tokens)
        maps, results = [], []
        for head in range(self.heads):
            part = slice(head * width, (head + 1) * width)
            rows = [torch.exp((k[:, part] * query).sum(1) / width**0.5) for query in q[:, part]]
            maps.append(torch.stack([row / row.sum() for row in rows]))
        attention = torch.stack(maps)
        for head in range(self.heads):
            results.append(attention[head] @ v[:, head * width : (head + 1) * width])
        return self.out(torch.cat(results, 1)), attention


@dataclass
class SlowBlock:
    """One block: attention and a perceptron, each after a normalisation and beside a skip connection."""

    norm1: Step
    attention: SlowAttention
    norm2: Step
    perceptron: Step

    def __call__(self, tokens: Tensor) -> tuple[Tensor, Tensor]:
        normal = self.norm1(tokens)
        attended, attention = self.attention(normal, normal)
        tokens = tokens + attended
        return tokens + self.perceptron(self.norm2(tokens)), attention


@dataclass
class SlowPool:
    """An attention pool of one query, with a perceptron after it."""

    query: Tensor
    attention: SlowAttention
    norm: Step
    perceptron: Step

    def __call__(self, tokens: Tensor) -> tuple[Tensor, Tensor]:
        pooled, attention = self.attention(self.query, tokens)
        return (pooled + self.perceptron(self.norm(pooled)))[0], attention


@dataclass
class SlowViT:
    """A transformer: what it does to the tokens (tokens, C) of one picture."""

    patches: nn.Conv2d
    prefix: Tensor
    positions: Tensor
    blocks: list[SlowBlock]
    norm: Step
    head: Step
    averages: bool = False
    pool: SlowPool | None = None

    def embed(self, image: Tensor) -> Tensor:
        cells = self.patches(image[None])[0].flatten(1).T
        return torch.cat([self.prefix, cells]) + self.positions

    def score(self, tokens: Tensor, target: int) -> tuple[Tensor, list[Tensor]]:
        """Return the logit of a class from the last tokens, and the map of the pool, if there is one."""
        if self.pool is not None:
            pooled, attention = self.pool(self.norm(tokens))
            return self.head(pooled)[target], [attention]
        pooled = tokens[len(self.prefix) :].mean(0) if self.averages else tokens[0]
        return self.head(self.norm(pooled))[target], []

    def maps_and_gradients(self, image: Tensor, target: int) -> tuple[list[Array], list[Array]]:
        """Return the attention map of each layer (heads, queries, keys), and the gradient of the score."""
        tokens, maps = self.embed(image.double()), []
        for block in self.blocks:
            tokens, attention = block(tokens)
            maps.append(attention)
        score, of_pool = self.score(tokens, target)
        gradients = torch.autograd.grad(score, maps + of_pool)
        return [each.detach().numpy() for each in maps + of_pool], [each.numpy() for each in gradients]

    def legrad(self, image: Tensor, target: int) -> Array:
        """LeGrad, Bousselham et al. 2024: for each layer l, S_l = head(norm(mean of Z_l)), positive dS_l / dA_l.

        The mean is that of all tokens, the class token included, as in the authors' code. With an attention pool, the
        pool reads Z_l, and the gradient is that with respect to its map.
        """
        tokens, total = self.embed(image.double()), np.zeros(1)
        for block in self.blocks:
            tokens, attention = block(tokens.detach())
            if self.pool is None:
                score = self.head(self.norm(tokens.mean(0)))[target]
            else:
                score, (attention,) = self.score(tokens, target)
            (gradient,) = torch.autograd.grad(score, attention)
            total = total + gradient.clamp(min=0).mean((0, 1)).numpy() / len(self.blocks)
        return total


def _linear(weight: Tensor, bias: Tensor) -> Step:
    return partial(functional.linear, weight=weight, bias=bias)


def _packed(weight: Tensor, bias: Tensor, out: Step, heads: int) -> SlowAttention:
    query, key, value = map(_linear, weight.chunk(3), bias.chunk(3))
    return SlowAttention(query, key, value, out, heads)


def from_torchvision(model: Any) -> SlowViT:
    model, blocks = copy.deepcopy(model).double(), []
    for block in model.encoder.layers:
        inner = block.self_attention
        attention = _packed(inner.in_proj_weight, inner.in_proj_bias, inner.out_proj, inner.num_heads)
        blocks.append(SlowBlock(block.ln_1, attention, block.ln_2, block.mlp))
    positions = model.encoder.pos_embedding[0]
    return SlowViT(model.conv_proj, model.class_token[0], positions, blocks, model.encoder.ln, model.heads.head)


def from_timm(model: Any) -> SlowViT:
    model, blocks, pool = copy.deepcopy(model).double(), [], None
    for block in model.blocks:
        inner = block.attn
        attention = _packed(inner.qkv.weight, inner.qkv.bias, inner.proj, inner.num_heads)
        blocks.append(SlowBlock(block.norm1, attention, block.norm2, block.mlp))
    if model.attn_pool is not None:
        made = model.attn_pool
        key, value = map(_linear, made.kv.weight.chunk(2), made.kv.bias.chunk(2))
        attention = SlowAttention(made.q, key, value, made.proj, made.num_heads)
        pool = SlowPool(made.latent[0], attention, made.norm, made.mlp)
    averages = model.global_pool == "avg"
    prefix = torch.zeros(0, model.embed_dim).double() if model.cls_token is None else model.cls_token[0]
    norm = model.fc_norm if averages else model.norm
    return SlowViT(
        model.patch_embed.proj, prefix, model.pos_embed[0], blocks, norm, model.head, averages=averages, pool=pool
    )


def from_huggingface(model: Any) -> SlowViT:
    model, blocks = copy.deepcopy(model).double(), []
    for layer in model.vit.layers:
        inner = layer.attention
        heads = model.config.num_attention_heads
        attention = SlowAttention(inner.q_proj, inner.k_proj, inner.v_proj, inner.o_proj, heads)
        blocks.append(SlowBlock(layer.layernorm_before, attention, layer.layernorm_after, layer.mlp))
    parts = model.vit.embeddings
    patches, positions = parts.patch_embeddings.projection, parts.position_embeddings[0]
    return SlowViT(patches, parts.cls_token[0], positions, blocks, model.vit.layernorm, model.classifier)


# --- the methods, for one picture: the maps of the layers (heads, queries, keys), and the rows that the head reads


def rollout(maps: list[Array], gradients: list[Array], rows: Array) -> Array:
    """Attention rollout, Abnar and Zuidema 2020, section 4: A = 0.5 W + 0.5 I, multiplied layer by layer."""
    fused = [layer.mean(0) for layer in maps]
    return _product([0.5 * layer if _is_square(layer) else layer for layer in fused], [0.5] * len(fused), rows)


def gradrollout(maps: list[Array], gradients: list[Array], rows: Array) -> Array:
    """Gradient attention rollout, Gildenblat 2020: ReLU of the mean of A G over heads, plus I, rows divided by sums."""
    mixes, kept = [], []
    for layer, gradient in zip(maps, gradients, strict=True):
        fused = np.maximum((layer * gradient).mean(0), 0)
        sums = 1 + fused.sum(1)
        mixes.append(fused / sums[:, None])
        kept.append(1 / sums)
    return _product(mixes, kept, rows)


def chefer(maps: list[Array], gradients: list[Array], rows: Array) -> Array:
    """Generic relevance, Chefer et al. 2021, Eq. 5: A' = E_h((G A)^+), Eq. 6: R = R + A' R, from R = I."""
    mixes = [np.maximum(layer * g, 0).mean(0) for layer, g in zip(maps, gradients, strict=True)]
    return _product(mixes, [1.0] * len(mixes), rows)


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
