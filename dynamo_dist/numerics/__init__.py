"""Numbers of a step: against those of one device, and those of a compiled step against eager
mode's.
"""

from dynamo_dist.numerics.comparison import Comparison as Comparison
from dynamo_dist.numerics.comparison import VariantResult as VariantResult
from dynamo_dist.numerics.comparison import compare as compare
from dynamo_dist.numerics.verification import Report as Report
from dynamo_dist.numerics.verification import verify as verify
