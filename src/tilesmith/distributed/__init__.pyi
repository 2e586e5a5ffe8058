# Written by: python -m tilesmith.validate.stubs

from tilesmith.distributed.attention import context_parallel_attention as context_parallel_attention
from tilesmith.distributed.attention import ring_of as ring_of
from tilesmith.distributed.cost import Decision as Decision
from tilesmith.distributed.cost import Estimate as Estimate
from tilesmith.distributed.cost import Link as Link
from tilesmith.distributed.cost import Machine as Machine
from tilesmith.distributed.experts import expert_parallel as expert_parallel
from tilesmith.distributed.explanation import explain_context_parallel as explain_context_parallel
from tilesmith.distributed.layout import Layout as Layout
from tilesmith.distributed.lost import RingError as RingError
from tilesmith.distributed.protocol import Ring as Ring
from tilesmith.distributed.ring import LocalRing as LocalRing
from tilesmith.distributed.ring import ProcessGroupRing as ProcessGroupRing
from tilesmith.distributed.sequence import SharedSequence as SharedSequence
