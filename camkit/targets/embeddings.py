"""Targets on embeddings (N, D): how similar a picture is to a reference."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import cosine_similarity

from camkit.errors import TargetError
from camkit.targets.outputs import embedding_of
from camkit.targets.scores import Scores


def _scaled(embeddings: Tensor) -> Tensor:
    """Return embeddings scaled to a largest number of one, so that no epsilon of a small one's cosine decides."""
    largest = embeddings.detach().abs().amax(1, keepdim=True)
    return embeddings / torch.where(largest > 0, largest, 1)


@dataclass(frozen=True, eq=False)
class SimilarTarget:
    """The cosine of a picture's embedding with that of a reference: a picture, or an embedding (D,).

    What is similar in two pictures, after Stylianou et al. 2019 and Chen et al. 2020.
    """

    reference: Any

    @property
    def embedding(self) -> Tensor | None:
        """The reference's embedding (D,), where it is one already."""
        known = isinstance(self.reference, Tensor) and self.reference.dim() == 1
        return self.reference.detach() if known else None

    def __call__(self, output: Any, batch: int) -> Scores:
        """Return the cosine similarity of each image."""
        embedded = embedding_of(output, batch)
        reference = self.embedding
        if reference is None:
            raise TargetError("the reference picture has not been embedded")
        if len(reference) != embedded.shape[1]:
            raise TargetError(
                f"the reference has {len(reference)} numbers and the model's embedding {embedded.shape[1]}"
            )
        values = cosine_similarity(_scaled(embedded), _scaled(reference.to(embedded)[None]), dim=1)
        return Scores(values=values, description="similarity to the reference")

    def embedded(self, output: Any) -> SimilarTarget:
        """Return the target with the embedding that the model gave the reference picture."""
        return SimilarTarget(torch.clone(embedding_of(output, 1)[0].detach()))
