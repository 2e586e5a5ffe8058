# Written by: python -m tilesmith.validate.stubs

from tilesmith.models.attention.sdpa import register_for_sdpa as register_for_sdpa
from tilesmith.models.optimization import optimize as optimize
from tilesmith.models.optimization import report as report
from tilesmith.models.optimization import undo as undo
from tilesmith.models.registration import register_for_transformers as register_for_transformers
from tilesmith.models.sequence import model_sharding as model_sharding
from tilesmith.models.sequence import shard_sequence as shard_sequence
from tilesmith.models.sizing.sequence_plan import fit_sequence as fit_sequence
