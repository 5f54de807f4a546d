"""Deep feature factorisation: the concepts that a layer's feature maps are made of, in one picture or several."""

from camkit.concepts.concepts import Concepts
from camkit.concepts.factorising import factorise

__all__ = ["Concepts", "factorise"]
