"""What happens in each layer of a model on a batch of pictures: statistics, gradients, and what is wrong."""

from camkit.diagnosis.diagnosis import Diagnosis as Diagnosis
from camkit.diagnosis.diagnosis import diagnose as diagnose
from camkit.diagnosis.findings import Finding as Finding
from camkit.diagnosis.layer_statistics import LayerStatistics as LayerStatistics
from camkit.diagnosis.tensor_statistics import TensorStatistics as TensorStatistics
