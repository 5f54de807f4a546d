"""What happens inside a model: statistics of layers, feature maps, and the concepts that these are made of."""

from camkit.inspect.diagnosis import Diagnosis as Diagnosis
from camkit.inspect.diagnosis import diagnose as diagnose
from camkit.inspect.feature_maps import Concepts as Concepts
from camkit.inspect.feature_maps import factorise as factorise
from camkit.inspect.findings import Finding as Finding
from camkit.inspect.layer_statistics import LayerStatistics as LayerStatistics
from camkit.inspect.layer_statistics import TensorStatistics as TensorStatistics
