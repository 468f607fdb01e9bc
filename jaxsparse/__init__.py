"""Communication-efficient data-parallel training for JAX, as optax transformations.

A gradient goes in on every worker; the mean of what the workers chose to send comes
out, the same on every worker; what was not sent stays behind. Only the chosen bytes
cross the network.

    import jaxsparse as js

    tx = optax.chain(
        js.error_feedback(
            js.sparse(js.top_k(1e-3), js.all_gather(), axis_name="workers")
        ),
        optax.sgd(0.1, momentum=0.9),
    )
"""

from . import codec as codec
from . import cost as cost
from . import lgc as lgc
from .aliases import clip_by_local_norm as clip_by_local_norm
from .aliases import dgc as dgc
from .aliases import ef_sign_sgd as ef_sign_sgd
from .aliases import power_sgd as power_sgd
from .base import Exchange as Exchange
from .base import ExchangeMetrics as ExchangeMetrics
from .base import Priority as Priority
from .base import Reducer as Reducer
from .base import Selection as Selection
from .base import WorkerLocal as WorkerLocal
from .exchange import all_gather as all_gather
from .exchange import g_top_k as g_top_k
from .exchange import server as server
from .exchange import shared_support as shared_support
from .exchange.collectives import vary as vary
from .hierarchical import axis_groups as axis_groups
from .hierarchical import hierarchical as hierarchical
from .labels import label_leaves as label_leaves
from .learning_rate import follow_learning_rate as follow_learning_rate
from .lgc.ring import lgc_ring as lgc_ring
from .lgc.server import lgc_server as lgc_server
from .memory import error_feedback as error_feedback
from .memory import momentum_correction as momentum_correction
from .memory import stateless as stateless
from .metrics import metrics as metrics
from .nonfinite import skip_nonfinite as skip_nonfinite
from .phases import phases as phases
from .priority import ema as ema
from .priority import frequency as frequency
from .priority import magnitude as magnitude
from .priority import penalty as penalty
from .priority import reg_top_k as reg_top_k
from .reducers import dense as dense
from .reducers import low_rank as low_rank
from .reducers import sign_mean as sign_mean
from .reducers import sparse as sparse
from .reshard import reshard as reshard
from .selection import random_block as random_block
from .selection import random_k as random_k
from .selection import sampled_top_k as sampled_top_k
from .selection import threshold as threshold
from .selection import top_k as top_k
from .state import local_leaves as local_leaves
from .state import merge as merge
from .state import split as split
from .state import stack_workers as stack_workers
from .state import state_axes as state_axes
from .state import unreplicate as unreplicate
from .traffic import link_bytes as link_bytes
from .traffic import payload_bytes as payload_bytes
from .traffic import traffic as traffic
