"""What a step costs, as a function of workers, entries and link rates: on the host.

N workers select k entries each, u entries are in their union, n is the number of
parameters.

* `sizes.py`: how many bytes is a message of m of n entries?
* `models.py`: what do the textbook's ways of communication move?
* `programs.py`: what do the library's own exchanges move, to the byte?
* `steps.py`: how long does that take?
* `unions.py`: how large is a union, and up to which one is a server worth it?
"""

from .models import central as central
from .models import decentralised as decentralised
from .models import dense as dense
from .models import sharded as sharded
from .programs import all_gather as all_gather
from .programs import expected_busiest as expected_busiest
from .programs import server as server
from .programs import shared_support as shared_support
from .sizes import bitmap_bytes as bitmap_bytes
from .sizes import coded_bytes as coded_bytes
from .sizes import dense_bytes as dense_bytes
from .sizes import entries as entries
from .sizes import ideal_bytes as ideal_bytes
from .sizes import int32_bytes as int32_bytes
from .sizes import smallest_bytes as smallest_bytes
from .steps import Step as Step
from .steps import Transfer as Transfer
from .steps import seconds as seconds
from .unions import equal_union as equal_union
from .unions import expected_union as expected_union
from .unions import server_wins_up_to as server_wins_up_to
from .unions import union_bounds as union_bounds
