"""Learned gradient compression: codes trained in the run, and their reducers."""

from . import cost as cost
from .code import Code as Code
from .code import convolutional as convolutional
from .code import count_parameters as count_parameters
from .code import identity as identity
from .code import linear as linear
from .code import mean as mean
from .layers import layers as layers
from .order import Order as Order
from .order import coordinate as coordinate
from .order import flipped as flipped
from .order import signed as signed
from .ring import lgc_ring as lgc_ring
from .server import lgc_server as lgc_server
from .training import Training as Training
