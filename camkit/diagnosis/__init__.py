"""What happens in each layer of a model on a batch of pictures: statistics, gradients, and what is wrong."""

from camkit.diagnosis.run import diagnose as diagnose
from camkit.diagnosis.values import Diagnosis as Diagnosis
from camkit.diagnosis.values import Finding as Finding
from camkit.diagnosis.values import LayerStatistics as LayerStatistics
from camkit.diagnosis.values import TensorStatistics as TensorStatistics
