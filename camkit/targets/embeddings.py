"""Targets on embeddings (N, D): how similar a picture is to a reference."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import cosine_similarity

from camkit.errors import TargetError
from camkit.targets.outputs import embedding_of
from camkit.targets.scores import Scores, Target


def _scaled(embeddings: Tensor) -> Tensor:
    """Scale each embedding to a largest absolute value of 1, so that the epsilon of the cosine never decides."""
    largest = embeddings.detach().abs().amax(1, keepdim=True)
    return embeddings / torch.where(largest > 0, largest, 1)


@dataclass(frozen=True, eq=False)
class SimilarTarget(Target):
    """The cosine similarity of a picture's embedding and a reference, which is a picture or an embedding (D,).

    Shows what two pictures have in common (Stylianou et al. 2019, Chen et al. 2020).
    """

    reference: Any

    @property
    def embedding(self) -> Tensor | None:
        """The embedding (D,) of the reference; None while the reference is still a picture."""
        is_embedding = isinstance(self.reference, Tensor) and self.reference.dim() == 1
        return self.reference.detach() if is_embedding else None

    def __call__(self, output: Any, batch: int) -> Scores:
        """Return the cosine similarity of each image."""
        embeddings = embedding_of(output, batch)
        reference = self.embedding
        assert reference is not None  # the Explainer has run the reference picture
        if len(reference) != embeddings.shape[1]:
            raise TargetError(
                f"the reference has {len(reference)} numbers, but the model's embedding has {embeddings.shape[1]}"
            )
        values = cosine_similarity(_scaled(embeddings), _scaled(reference.to(embeddings)[None]), dim=1)
        return Scores(values=values, description="similarity to the reference", quantity="cosine similarity")

    def embedded(self, output: Any) -> SimilarTarget:
        """Return the target for the reference's embedding, given the model's output for the reference picture."""
        return SimilarTarget(torch.clone(embedding_of(output, 1)[0].detach()))


def similar_to(reference: Any) -> SimilarTarget:
    """Return a target for the similarity to a reference: a picture as ``explain`` takes it, or an embedding (D,)."""
    return SimilarTarget(Path(reference) if isinstance(reference, str) else reference)
